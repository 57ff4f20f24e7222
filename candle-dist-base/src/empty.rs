//! Tensors without elements on a GPU. candle launches most of its kernels for them without blocks, which CUDA refuses.
//!
//! Such tensors are computed on the host: nothing is copied, and the graph goes on.
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{
    CpuStorage, CudaStorage, CustomOp1, CustomOp2, CustomOp3, DType, Device, Layout, MetalStorage, Result,
    Shape, Tensor, WithDType, bail,
};

/// Returns whether candle cannot compute on this tensor where it is: it has no elements and is not on the host.
pub fn is_empty_off_host(x: &Tensor) -> bool {
    !x.device().is_cpu() && x.elem_count() == 0
}

/// Returns the tensor on the host, with its graph. Only its own elements are copied.
pub fn to_host(x: &Tensor) -> Result<Tensor> {
    if x.device().is_cpu() {
        return Ok(x.clone());
    }
    // candle's `to_device` copies the whole memory that a view is a part of.
    x.force_contiguous()?.to_device(&Device::Cpu)
}

/// Returns `f` of the tensor, computed on the host if candle cannot compute where the tensor is. The result is on the
/// device of the tensor.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist_base::empty;
///
/// let x = Tensor::zeros((0, 3), DType::BF16, &Device::Cpu)?;
/// assert_eq!(empty::compute(&x, |x| x.to_dtype(DType::F32))?.dims(), [0, 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// Those of `f`, and of copies.
pub fn compute(x: &Tensor, f: impl FnOnce(&Tensor) -> Result<Tensor>) -> Result<Tensor> {
    if is_empty_off_host(x) { f(&to_host(x)?)?.to_device(x.device()) } else { f(x) }
}

/// Returns a tensor with one value everywhere, converted to `dtype`.
///
/// ```
/// use candle_core::{DType, Device};
///
/// let none = candle_dist_base::empty::full(1.5, (0, 3), DType::BF16, &Device::Cpu)?;
/// assert_eq!((none.dims(), none.dtype()), (&[0, 3][..], DType::BF16));
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If candle fails.
pub fn full<T: WithDType>(
    value: T,
    shape: impl Into<Shape>,
    dtype: DType,
    device: &Device,
) -> Result<Tensor> {
    let shape = shape.into();
    match shape.elem_count() {
        0 => Tensor::zeros(shape, dtype, device),
        _ => Tensor::full(value, shape, device)?.to_dtype(dtype),
    }
}

/// Like [`Tensor::ones`], also without elements.
///
/// ```
/// use candle_core::{DType, Device};
///
/// assert_eq!(candle_dist_base::empty::ones((0, 3), DType::BF16, &Device::Cpu)?.dims(), [0, 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If candle fails.
pub fn ones(shape: impl Into<Shape>, dtype: DType, device: &Device) -> Result<Tensor> {
    let shape = shape.into();
    match shape.elem_count() {
        0 => Tensor::zeros(shape, dtype, device),
        _ => Tensor::ones(shape, dtype, device),
    }
}

/// Like [`Tensor::index_select`] of a tensor with any strides, with indexes of the host. There may be none.
///
/// ```
/// use candle_core::{Device, Tensor};
///
/// let x = Tensor::arange(0u32, 6, &Device::Cpu)?.reshape((3, 2))?;
/// assert_eq!(candle_dist_base::empty::index_select(&x, &[2, 0], 0)?.to_vec2::<u32>()?, [[4, 5], [0, 1]]);
/// assert_eq!(candle_dist_base::empty::index_select(&x, &[], 1)?.dims(), [3, 0]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If candle fails.
pub fn index_select(x: &Tensor, indexes: &[u32], dim: usize) -> Result<Tensor> {
    if indexes.is_empty() {
        return x.narrow(dim, 0, 0);
    }
    let select = |x: &Tensor| x.contiguous()?.index_select(&Tensor::new(indexes, x.device())?, dim);
    compute(x, select)
}

/// Returns zeros in the graph of all `inputs`, on the device of the first: a result that has no elements, or to which they
/// contribute none. Their gradients are zeros. No element is copied between devices.
///
/// Up to three inputs are those of one node, as they are of an operation with elements. So a backward pass visits the nodes of a rank
/// without elements in the order in which it visits those of the other ranks.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use candle_dist_base::empty;
///
/// let x = Var::ones((2, 3), DType::F32, &Device::Cpu)?;
/// let grads = empty::zeros_of(&[&x], (2, 0), DType::F32)?.sum_all()?.backward()?;
/// assert_eq!(grads.get(&x).unwrap().to_vec2::<f32>()?, [[0.0; 3]; 2]);
/// # Ok::<(), candle_core::Error>(())
/// ```
///
/// # Errors
/// If there is no input, or candle fails.
pub fn zeros_of(inputs: &[&Tensor], shape: impl Into<Shape>, dtype: DType) -> Result<Tensor> {
    let Some(first) = inputs.first() else { bail!("zeros_of: no inputs") };
    let (shape, device) = (shape.into(), first.device());
    let here = |x: &Tensor| -> Result<Tensor> {
        match x.device().same_device(device) {
            true => Ok(x.clone()),
            false => to_host(&x.flatten_all()?.narrow(0, 0, 0)?)?.to_device(device),
        }
    };
    let mut made: Option<Tensor> = None;
    let mut rest = inputs.iter().filter(|x| x.track_op() && dtype.is_float()).peekable();
    while rest.peek().is_some() {
        let room = if made.is_some() { 2 } else { 3 };
        let more = rest.by_ref().take(room).map(|x| here(x));
        let inputs = made.take().map(Ok).into_iter().chain(more).collect::<Result<Vec<_>>>()?;
        let of = inputs.iter().map(|x| (x.shape().clone(), x.dtype())).collect();
        let node = ZerosOp { shape: shape.clone(), dtype, of };
        made = Some(match &inputs[..] {
            [a, b, c] => a.apply_op3(b, c, node)?,
            [a, b] => a.apply_op2(b, node)?,
            inputs => inputs[0].apply_op1(node)?,
        });
    }
    made.map_or_else(|| Tensor::zeros(shape, dtype, device), Ok)
}

/// Zeros, to which the inputs contribute nothing.
struct ZerosOp {
    shape: Shape,
    dtype: DType,
    /// The shapes and dtypes of the inputs.
    of: Vec<(Shape, DType)>,
}

impl ZerosOp {
    fn zeros<D: BackendDevice<Storage = S>, S: BackendStorage<Device = D>>(
        &self,
        input: &S,
    ) -> Result<(S, Shape)> {
        Ok((input.device().zeros_impl(&self.shape, self.dtype)?, self.shape.clone()))
    }

    fn grad(&self, input: usize, grad: &Tensor) -> Result<Option<Tensor>> {
        let (shape, dtype) = &self.of[input];
        Tensor::zeros(shape, *dtype, grad.device()).map(Some)
    }
}

impl CustomOp1 for ZerosOp {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn cpu_fwd(&self, a: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.zeros(a)
    }

    fn cuda_fwd(&self, a: &CudaStorage, _: &Layout) -> Result<(CudaStorage, Shape)> {
        self.zeros(a)
    }

    fn metal_fwd(&self, a: &MetalStorage, _: &Layout) -> Result<(MetalStorage, Shape)> {
        self.zeros(a)
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.grad(0, grad)
    }
}

impl CustomOp2 for ZerosOp {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn cpu_fwd(&self, a: &CpuStorage, _: &Layout, _: &CpuStorage, _: &Layout) -> Result<(CpuStorage, Shape)> {
        self.zeros(a)
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.zeros(a)
    }

    fn metal_fwd(
        &self,
        a: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.zeros(a)
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        Ok((self.grad(0, grad)?, self.grad(1, grad)?))
    }
}

impl CustomOp3 for ZerosOp {
    fn name(&self) -> &'static str {
        "nothing"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.zeros(a)
    }

    fn cuda_fwd(
        &self,
        a: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
        _: &CudaStorage,
        _: &Layout,
    ) -> Result<(CudaStorage, Shape)> {
        self.zeros(a)
    }

    fn metal_fwd(
        &self,
        a: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
        _: &MetalStorage,
        _: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        self.zeros(a)
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok((self.grad(0, grad)?, self.grad(1, grad)?, self.grad(2, grad)?))
    }
}
