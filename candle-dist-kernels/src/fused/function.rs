//! Functions of one number and gates, in one launch each.
use super::call::{FusedCall, KernelText, Scalar};
use super::run::{made, node, threads_of_each};
use candle_core::{Result, Tensor};
use candle_dist_base::{Fresh, edges};

/// A launch over all elements of contiguous tensors of one shape.
fn each<const N: usize>(
    op: &'static str,
    inputs: &[Option<&Tensor>],
    x: &Tensor,
    rest: &[Scalar],
) -> Result<[Fresh; N]> {
    let (grid, block) = threads_of_each(x.elem_count());
    let outputs = vec![Some((x.shape().clone(), x.dtype())); N];
    let numbers = [&[Scalar::Count(x.elem_count())], rest].concat();
    let text = KernelText::Functions;
    made(&FusedCall { text, op, dtype: x.dtype(), grid, block, inputs, outputs: &outputs, numbers: &numbers })
}

/// The function of each element, which has this number in `functions.cu` and this parameter.
pub(crate) fn function(name: &'static str, (which, a): (usize, f64), x: &Tensor) -> Result<Tensor> {
    let numbers = [Scalar::Count(which), Scalar::Real(a)];
    let x = x.contiguous()?;
    let [out] = each("function", &[Some(&x)], &x, &numbers)?;
    let input = x.clone();
    node(name, &[&x], out, move |grad| {
        let grad = grad.contiguous()?;
        let [dx] = each("function_input", &[Some(&input), Some(&grad)], &input, &numbers)?;
        Ok([edges::keep(&input, dx.into_tensor())?, None, None])
    })
}

/// `x · sigmoid(x) · gate`; with an alpha and a limit, the clamped gate.
pub(crate) fn gate(
    name: &'static str,
    x: &Tensor,
    gate: &Tensor,
    clamped: Option<[f64; 2]>,
) -> Result<Tensor> {
    let numbers = clamped.unwrap_or([1.0, 0.0]).map(Scalar::Real);
    let (x, gate) = (x.contiguous()?, gate.contiguous()?);
    let [out] = each("gate", &[Some(&x), Some(&gate)], &x, &numbers)?;
    let inputs = [x.clone(), gate.clone()];
    node(name, &[&x, &gate], out, move |grad| {
        let ([x, gate], grad) = (&inputs, grad.contiguous()?);
        let [dx, dgate] = each("gate_inputs", &[Some(x), Some(gate), Some(&grad)], x, &numbers)?;
        let of = |input: &Tensor, made: Fresh| match input.track_op() {
            true => edges::keep(input, made.into_tensor()),
            false => Ok(None),
        };
        Ok([of(x, dx)?, of(gate, dgate)?, None])
    })
}
