//! Ops of two or three inputs that compute in f32 or in f64.
use super::elements;
use super::real::Real;
use candle_core::{CpuStorage, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Tensor};

/// An op on contiguous CPU tensors of one dtype, f32 or f64.
pub(super) trait FloatOp<const N: usize>: Send + Sync + 'static {
    /// The name, for errors.
    const NAME: &'static str;

    /// Returns the elements of the result, and its shape.
    fn forward<T: Real>(&self, inputs: [&[T]; N], shapes: [&Shape; N]) -> Result<(Vec<T>, Shape)>;

    /// Returns the gradients of the inputs from that of the result, which is contiguous.
    fn backward<T: Real>(&self, inputs: [&Tensor; N], grad: &Tensor) -> Result<[Option<Tensor>; N]>;
}

/// An op for `edges::apply2` and `edges::apply3`.
pub(super) struct FloatNode<O>(pub(super) O);

impl<O> FloatNode<O> {
    fn forward<const N: usize>(&self, inputs: [(&CpuStorage, &Layout); N]) -> Result<(CpuStorage, Shape)>
    where
        O: FloatOp<N>,
    {
        match inputs[0].0 {
            CpuStorage::F64(_) => self.forward_in::<f64, N>(inputs),
            _ => self.forward_in::<f32, N>(inputs),
        }
    }

    fn forward_in<T: Real, const N: usize>(
        &self,
        inputs: [(&CpuStorage, &Layout); N],
    ) -> Result<(CpuStorage, Shape)>
    where
        O: FloatOp<N>,
    {
        let mut slices = [&[][..]; N];
        for (slice, (storage, layout)) in slices.iter_mut().zip(inputs) {
            *slice = elements(storage, layout)?;
        }
        let (out, shape) = self.0.forward::<T>(slices, inputs.map(|(_, layout)| layout.shape()))?;
        Ok((T::to_cpu_storage_owned(out), shape))
    }

    fn backward<const N: usize>(&self, inputs: [&Tensor; N], grad: &Tensor) -> Result<[Option<Tensor>; N]>
    where
        O: FloatOp<N>,
    {
        let grad = grad.contiguous()?;
        match inputs[0].dtype() {
            DType::F64 => self.0.backward::<f64>(inputs, &grad),
            _ => self.0.backward::<f32>(inputs, &grad),
        }
    }
}

impl<O: FloatOp<2>> CustomOp2 for FloatNode<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_l: &Layout,
        b: &CpuStorage,
        b_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward([(a, a_l), (b, b_l)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>)> {
        self.backward([a, b], grad).map(Into::into)
    }
}

impl<O: FloatOp<3>> CustomOp3 for FloatNode<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        a_l: &Layout,
        b: &CpuStorage,
        b_l: &Layout,
        c: &CpuStorage,
        c_l: &Layout,
    ) -> Result<(CpuStorage, Shape)> {
        self.forward([(a, a_l), (b, b_l), (c, c_l)])
    }

    fn bwd(
        &self,
        a: &Tensor,
        b: &Tensor,
        c: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        self.backward([a, b, c], grad).map(Into::into)
    }
}
