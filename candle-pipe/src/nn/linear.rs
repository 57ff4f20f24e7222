//! The affine layer whose weight gradient can be put off.
use super::LateGradients;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp2, D, Layout, MetalStorage, Result, Shape, Tensor, bail};
use candle_nn::{Module, VarBuilder};

/// `y = x · weightᵀ + bias`, as candle's layer with the same parameters, but in a stage with a weight gradient that
/// [`Tape::backward_inputs`](crate::Tape::backward_inputs) leaves for later.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder};
///
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let layer = candle_pipe::nn::linear(2, 3, vb)?;
/// assert_eq!(layer.forward(&Tensor::ones((4, 5, 2), DType::F32, &Device::Cpu)?)?.dims(), [4, 5, 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// A layer with a `weight` `[n, k]` and perhaps a `bias` `[n]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// The weight `[n, k]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// The bias `[n]`, if there is one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl From<candle_nn::Linear> for Linear {
    fn from(layer: candle_nn::Linear) -> Self {
        Self::new(layer.weight().clone(), layer.bias().cloned())
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        deferred_linear(x, &self.weight, self.bias.as_ref())
    }
}

/// A layer with parameters `weight` and `bias`, initialised as candle's.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    candle_nn::linear(in_dim, out_dim, vb).map(Linear::from)
}

/// A layer with the parameter `weight`, initialised as candle's.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    candle_nn::linear_no_bias(in_dim, out_dim, vb).map(Linear::from)
}

/// `x · weightᵀ + bias`: `[.., k]` by `[n, k]`, plus `[n]`, gives `[.., n]`.
///
/// In a stage, where `weight` is a variable of that stage, its gradient can be put off; elsewhere this is an ordinary
/// differentiable function.
///
/// # Errors
/// If shapes, dtypes or devices do not agree.
pub fn deferred_linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (n, k) = weight.dims2()?;
    if x.dim(D::Minus1)? != k || x.dtype() != weight.dtype() {
        let (x_type, weight_type) = (x.dtype().as_str(), weight.dtype().as_str());
        bail!("linear: {x_type}{:?} does not fit a weight {weight_type}[{n}, {k}]", x.dims());
    }
    let lead = &x.dims()[..x.rank() - 1];
    let rows = x.reshape((lead.iter().product::<usize>(), k))?.contiguous()?;
    let y = rows.apply_op2(&weight.contiguous()?, Product(LateGradients::of_stage()))?;
    let y = y.reshape([lead, &[n]].concat())?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// The product of `x [rows, k]` and the transpose of `weight [n, k]`, of a stage with this queue.
struct Product(LateGradients);

fn product<S>(x: &S, x_l: &Layout, w: &S, w_l: &Layout) -> Result<(S, Shape)>
where
    S: BackendStorage,
    S::Device: BackendDevice<Storage = S>,
{
    let ((rows, k), (n, _)) = (x_l.shape().dims2()?, w_l.shape().dims2()?);
    let shape = Shape::from((rows, n));
    let y = match rows * n * k {
        0 => w.device().zeros_impl(&shape, w.dtype())?,
        _ => x.matmul(w, (1, rows, n, k), x_l, &w_l.transpose(0, 1)?)?,
    };
    Ok((y, shape))
}

impl CustomOp2 for Product {
    fn name(&self) -> &'static str {
        "deferred-linear"
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_l: &Layout, w: &CpuStorage, w_l: &Layout) -> Result<(CpuStorage, Shape)> {
        product(x, x_l, w, w_l)
    }

    fn cuda_fwd(&self, x: &CudaStorage, x_l: &Layout, w: &CudaStorage, w_l: &Layout) -> Result<(CudaStorage, Shape)> {
        product(x, x_l, w, w_l)
    }

    fn metal_fwd(
        &self,
        x: &MetalStorage,
        x_l: &Layout,
        w: &MetalStorage,
        w_l: &Layout,
    ) -> Result<(MetalStorage, Shape)> {
        product(x, x_l, w, w_l)
    }

    fn bwd(&self, x: &Tensor, w: &Tensor, _: &Tensor, grad: &Tensor) -> Result<(Option<Tensor>, Option<Tensor>)> {
        let grad = grad.detach().contiguous()?;
        let dx = x.track_op().then(|| match grad.elem_count() {
            0 => x.zeros_like(),
            _ => grad.matmul(&w.detach()),
        });
        if !w.track_op() {
            return Ok((dx.transpose()?, None));
        }
        let (like, x) = (w.detach(), x.detach());
        let dw = self.0.give(w, move || match x.elem_count() * grad.elem_count() {
            0 => like.zeros_like(),
            _ => grad.t()?.matmul(&x),
        })?;
        Ok((dx.transpose()?, dw))
    }
}
