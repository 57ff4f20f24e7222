//! Functions of one number and gates, in one launch each.
use super::{FusedCall, KernelText, Scalar, made, node, threads_of_each};
use crate::function::Function;
use candle_core::{Result, Tensor};
use candle_dist_base::{Fresh, edges};

impl Function {
    /// The number of the function in `functions.cu`, and its parameter.
    const fn in_text(self) -> (usize, f64) {
        match self {
            Self::Gelu => (0, 0.0),
            Self::GeluErf => (1, 0.0),
            Self::Silu => (2, 0.0),
            Self::Mish => (3, 0.0),
            Self::Sigmoid => (4, 0.0),
            Self::Tanh => (5, 0.0),
            Self::Erf => (6, 0.0),
            Self::HardSwish => (7, 0.0),
            Self::Elu(alpha) => (8, alpha),
            Self::LeakyRelu(factor) => (9, factor),
            Self::Power(e) => (10, e),
            Self::Recip => (11, 0.0),
            Self::Rsqrt => (12, 0.0),
        }
    }
}

/// A launch over all elements of contiguous tensors of one shape.
fn each<const N: usize>(op: &'static str, inputs: &[Option<&Tensor>], x: &Tensor, rest: &[Scalar]) -> Result<[Fresh; N]> {
    let (grid, block) = threads_of_each(x.elem_count());
    let outputs = vec![Some((x.shape().clone(), x.dtype())); N];
    let numbers = [&[Scalar::Count(x.elem_count())], rest].concat();
    let text = KernelText::Functions;
    made(&FusedCall { text, op, dtype: x.dtype(), grid, block, inputs, outputs: &outputs, numbers: &numbers })
}

/// The function of each element.
pub(crate) fn function(function: Function, name: &'static str, x: &Tensor) -> Result<Tensor> {
    let (which, a) = function.in_text();
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
pub(crate) fn gate(name: &'static str, x: &Tensor, gate: &Tensor, clamped: Option<[f64; 2]>) -> Result<Tensor> {
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
