use candle_core::{Error, Result, Shape, Tensor};
use candle_dist_base::{edges, empty};

use super::float_op::{FloatNode, FloatOp};
use super::function::{Function, logistic, near, weighted};
use super::{check_dtype, compute_dtype, fused, real::Real, rows::new_by_blocks};

/// The gated SiLU `x · sigmoid(x) · gate`, the activation of SwiGLU.
///
/// `x` and `gate` have the same dtype and the same shape, which is that of the result. Fails if shapes or dtypes do not
/// match and on dtypes other than floats. Source: Shazeer, <https://arxiv.org/abs/2002.05202>.
///
/// ```
/// # fn main() -> candle_core::Result<()> {
/// use candle_core::{Device::Cpu, Tensor};
/// let (x, gate) = (Tensor::new(&[0f64, 100.], &Cpu)?, Tensor::new(&[7f64, 2.], &Cpu)?);
/// assert_eq!(candle_dist_kernels::silu_gate(&x, &gate)?.to_vec1::<f64>()?, [0.0, 200.0]);
/// # Ok(())
/// # }
/// ```
pub fn silu_gate(x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    gated(SiluGate, [x, gate], (true, None), &|| composed(x, gate))
}

/// A gate of two tensors of one shape: by a kernel with these numbers if there is one, off the host by candle's operations.
pub(super) fn gated<O: FloatOp<2>>(
    op: O,
    [x, gate]: [&Tensor; 2],
    (has_kernel, numbers): (bool, Option<[f64; 2]>),
    composed: &dyn Fn() -> Result<Tensor>,
) -> Result<Tensor> {
    compute_dtype(O::NAME, x)?;
    check_dtype(O::NAME, x, gate)?;
    if x.dims() != gate.dims() {
        let (lhs, rhs) = (x.shape().clone(), gate.shape().clone());
        return Err(Error::ShapeMismatchBinaryOp { lhs, rhs, op: O::NAME }.bt());
    }
    if has_kernel && fused::computes(&[x, gate]) {
        return fused::function::gate(O::NAME, x, gate, numbers);
    }
    if !x.device().is_cpu() {
        return composed();
    }
    edges::apply2(&edges::contiguous(x)?, &edges::contiguous(gate)?, FloatNode(op))
}

pub(super) fn composed(x: &Tensor, gate: &Tensor) -> Result<Tensor> {
    // candle returns the left side of a product without elements, and forgets the right one.
    if x.elem_count() == 0 {
        return empty::zeros_of(&[x, gate], x.shape(), x.dtype());
    }
    Function::Silu.apply(x)? * gate
}

struct SiluGate;

/// Applies `f` to the elements of three slices.
pub(super) fn zip<T: Real>(a: &[T], b: &[T], c: &[T], f: impl Fn(T, T, T) -> T + Sync) -> Vec<T> {
    let (out, _) = new_by_blocks(
        a.len(),
        1,
        1,
        #[inline(always)]
        |first, out| {
            for (((out, &a), &b), &c) in out.iter_mut().zip(&a[first..]).zip(&b[first..]).zip(&c[first..]) {
                *out = f(a, b, c);
            }
        },
    );
    out
}

impl FloatOp<2> for SiluGate {
    const NAME: &'static str = "silu_gate";

    fn forward<T: Real>(&self, [x, gate]: [&[T]; 2], shapes: [&Shape; 2]) -> Result<(Vec<T>, Shape)> {
        let out = zip(
            x,
            gate,
            x,
            #[inline(always)]
            |x, gate, _| weighted(x, logistic(x).0) * gate,
        );
        Ok((out, shapes[0].clone()))
    }

    fn backward<T: Real>(
        &self,
        [x, gate]: [&[T]; 2],
        _: [&Shape; 2],
        [for_x, for_gate]: [bool; 2],
        grad: &[T],
    ) -> Result<[Option<Vec<T>>; 2]> {
        let slope = || {
            zip(
                x,
                gate,
                grad,
                #[inline(always)]
                |x, gate, grad| {
                    let (s, rest) = logistic(x);
                    // First the slope: the product of the other two may be infinite.
                    s * (T::one() + near(x) * rest) * grad * gate
                },
            )
        };
        let value = || {
            zip(
                x,
                grad,
                grad,
                #[inline(always)]
                |x, grad, _| grad * weighted(x, logistic(x).0),
            )
        };
        Ok([for_x.then(slope), for_gate.then(value)])
    }
}
