//! Ops of one to three inputs that compute in f32 or in f64.
use super::convert::{converted, to_dtype};
use super::real::Real;
use super::{TensorReader, cpu, elements};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Device, Layout, Result, Shape, Tensor,
};

/// An op on contiguous CPU tensors of one dtype.
pub(super) trait FloatOp<const N: usize>: Send + Sync + 'static {
    /// The name, for errors.
    const NAME: &'static str;

    /// Returns the elements of the result, and its shape.
    fn forward<T: Real>(&self, inputs: [&[T]; N], shapes: [&Shape; N]) -> Result<(Vec<T>, Shape)>;

    /// Returns the gradients of the inputs from that of the result. An input that is not tracked needs none.
    fn backward<T: Real>(
        &self,
        inputs: [&[T]; N],
        shapes: [&Shape; N],
        is_tracked: [bool; N],
        grad: &[T],
    ) -> Result<[Option<Vec<T>>; N]>;
}

/// An op for `edges::apply1` to `edges::apply3`. Inputs of 16 bits are widened for each pass, so that the graph keeps 16 bits.
pub(super) struct FloatNode<O>(pub(super) O);

/// An operand in the dtype of a computation, if it has another one itself.
struct WideOperand(Option<CpuStorage>);

impl WideOperand {
    fn new<T: Real>(storage: &CpuStorage, layout: &Layout) -> Result<Self> {
        match T::cpu_storage_as_slice(storage) {
            Ok(_) => Ok(Self(None)),
            Err(_) => converted(storage, layout, T::DTYPE).map(|wide| Self(Some(wide))),
        }
    }

    /// The elements, where `storage` is the operand itself.
    fn elements<'a, T: Real>(&'a self, storage: &'a CpuStorage, layout: &Layout) -> Result<&'a [T]> {
        match &self.0 {
            Some(wide) => T::cpu_storage_as_slice(wide),
            None => elements(storage, layout),
        }
    }
}

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
        let mut wide = [const { WideOperand(None) }; N];
        for (wide, (storage, layout)) in wide.iter_mut().zip(inputs) {
            *wide = WideOperand::new::<T>(storage, layout)?;
        }
        let mut slices = [&[][..]; N];
        for ((slice, wide), (storage, layout)) in slices.iter_mut().zip(&wide).zip(inputs) {
            *slice = wide.elements(storage, layout)?;
        }
        let (out, shape) = self.0.forward::<T>(slices, inputs.map(|(_, layout)| layout.shape()))?;
        let (out, dtype) = (T::to_cpu_storage_owned(out), inputs[0].0.dtype());
        match dtype == T::DTYPE {
            true => Ok((out, shape)),
            false => Ok((converted(&out, &Layout::contiguous(&shape), dtype)?, shape)),
        }
    }

    fn backward<const N: usize>(&self, inputs: [&Tensor; N], grad: &Tensor) -> Result<[Option<Tensor>; N]>
    where
        O: FloatOp<N>,
    {
        let grad = grad.contiguous()?;
        match inputs[0].dtype() {
            DType::F64 => self.backward_in::<f64, N>(inputs, &grad),
            _ => self.backward_in::<f32, N>(inputs, &grad),
        }
    }

    fn backward_in<T: Real, const N: usize>(
        &self,
        inputs: [&Tensor; N],
        grad: &Tensor,
    ) -> Result<[Option<Tensor>; N]>
    where
        O: FloatOp<N>,
    {
        let widened = |reader: &TensorReader<'_>| WideOperand::new::<T>(cpu(&reader.storage)?, reader.layout);
        let readers = inputs.map(TensorReader::new);
        let mut wide = [const { WideOperand(None) }; N];
        for (wide, reader) in wide.iter_mut().zip(&readers) {
            *wide = widened(reader)?;
        }
        let mut slices = [&[][..]; N];
        for ((slice, wide), reader) in slices.iter_mut().zip(&wide).zip(&readers) {
            *slice = wide.elements(cpu(&reader.storage)?, reader.layout)?;
        }
        let reader = TensorReader::new(grad);
        let wide_grad = widened(&reader)?;
        let grad = wide_grad.elements::<T>(cpu(&reader.storage)?, reader.layout)?;
        let (shapes, is_tracked) = (inputs.map(Tensor::shape), inputs.map(Tensor::track_op));
        let made = self.0.backward::<T>(slices, shapes, is_tracked, grad)?;
        let mut grads = [const { None }; N];
        for ((grad, made), input) in grads.iter_mut().zip(made).zip(inputs) {
            if let Some(made) = made {
                let made = Tensor::from_vec(made, input.shape(), &Device::Cpu)?;
                *grad = Some(to_dtype(&made, input.dtype())?);
            }
        }
        Ok(grads)
    }
}

impl<O: FloatOp<1>> CustomOp1 for FloatNode<O> {
    fn name(&self) -> &'static str {
        O::NAME
    }

    fn cpu_fwd(&self, s: &CpuStorage, l: &Layout) -> Result<(CpuStorage, Shape)> {
        self.forward([(s, l)])
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> Result<Option<Tensor>> {
        self.backward([x], grad).map(|[grad]| grad)
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

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use crate::waves::waves;
    use crate::{RopePairs, clamped_gate, layer_norm, rms_norm, rope, short_conv, silu_gate};
    use candle_core::{DType, Result, Tensor, Var};

    /// An op of `[2, 5, 6]` and of two vectors of 6.
    type Op = fn(&Tensor, [&Tensor; 2]) -> Result<Tensor>;

    #[test]
    fn sixteen_bits_have_the_rounded_results_and_gradients_of_thirty_two() {
        let ops: [(&str, Op); 6] = [
            ("rms_norm", |x, [weight, _]| rms_norm(x, weight, 1e-5)),
            ("layer_norm", |x, [weight, bias]| layer_norm(x, weight, bias, 1e-5)),
            ("silu_gate", |x, [gate, _]| silu_gate(x, &gate.broadcast_as(x.shape())?)),
            ("clamped_gate", |x, [gate, _]| clamped_gate(x, &gate.broadcast_as(x.shape())?, 1.7, 0.5)),
            ("rope", |x, tables| {
                let [cos, sin] = tables.map(|table| table.detach().narrow(0, 0, 5)?.unsqueeze(1));
                rope(&x.narrow(2, 0, 2)?, &cos?, &sin?, 0, RopePairs::Halves)
            }),
            ("short_conv", |x, [weight, _]| short_conv(x, &weight.reshape((6, 1))?, None)),
        ];
        for (name, op) in ops {
            for half in [DType::BF16, DType::F16] {
                let narrow = [waves(&[2, 5, 6], half), waves(&[6], half), waves(&[6], half)];
                let wide = narrow.each_ref().map(|var| {
                    Var::from_tensor(&var.as_detached_tensor().to_dtype(DType::F32).unwrap()).unwrap()
                });
                let run = |vars: &[Var; 3]| {
                    let y = op(&vars[0], [&vars[1], &vars[2]]).unwrap();
                    let factors = (waves(y.dims(), half).as_detached_tensor() * 2.0).unwrap();
                    let loss = (&y * factors.to_dtype(y.dtype()).unwrap()).unwrap().sum_all().unwrap();
                    let grads = loss.backward().unwrap();
                    let of = |x: &Tensor| {
                        let rounded = x.to_dtype(half).unwrap().to_dtype(DType::F32).unwrap();
                        rounded.flatten_all().unwrap().to_vec1::<f32>().unwrap()
                    };
                    let grads = vars.each_ref().map(|var| grads.get(var).map(&of));
                    (of(&y), grads)
                };
                // Where an input is repeated, candle adds up its gradients in the dtype of the input.
                let (got, want) = (run(&narrow), run(&wide));
                assert_eq!((got.0, &got.1[0]), (want.0, &want.1[0]), "{name} {half:?}");
                if !name.ends_with("gate") {
                    assert_eq!(got.1[1..], want.1[1..], "{name} {half:?}");
                }
            }
        }
    }
}
