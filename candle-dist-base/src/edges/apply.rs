//! Custom ops of candle as nodes with tickets, and views of tensors that have tickets.
use super::node::{BackwardFn, Grads, node};
use super::value::{holder_of, remember};
use candle_core::backend::BackendStorage;
use candle_core::{
    CpuStorage, CustomOp1, CustomOp2, CustomOp3, DType, Layout, Result, Shape, Storage, Tensor, bail,
};
use std::sync::OnceLock;

/// Returns whether a result of `inputs` gets a ticket: if it needs a gradient and is on the CPU.
pub fn has_ticket(inputs: &[&Tensor]) -> bool {
    static IS_OFF: OnceLock<bool> = OnceLock::new();
    let is_off = || std::env::var("CANDLE_GRAD_DO_NOT_DETACH").is_ok_and(|set| !set.is_empty() && set != "0");
    inputs.iter().any(|x| x.track_op()) && inputs[0].device().is_cpu() && !*IS_OFF.get_or_init(is_off)
}

/// Returns the result of an op on one to three inputs on the CPU as a node of the graph.
///
/// `backward` returns the gradients of the inputs from the gradient of the result, which is contiguous. Each tracked
/// input that is not a variable must get one. The memory of the result is free when its last use is gone.
///
/// Call it only if [`has_ticket`].
pub fn record(
    name: &'static str,
    inputs: &[&Tensor],
    made: (CpuStorage, Shape),
    backward: impl Fn(&Tensor) -> Result<Grads> + Send + Sync + 'static,
) -> Result<Tensor> {
    node(name, inputs, made, false, Box::new(move |_, grad| backward(grad)))
}

/// Like [`Tensor::apply_op1`].
pub fn apply1<C: CustomOp1 + Send + Sync + 'static>(x: &Tensor, op: C) -> Result<Tensor> {
    if !has_ticket(&[x]) {
        return x.apply_op1(op);
    }
    let made = with_storage(x, |s, l| op.cpu_fwd(s, l))?;
    let (name, input) = (op.name(), x.clone());
    let backward = move |result: &Tensor, grad: &Tensor| Ok([op.bwd(&input, result, grad)?, None, None]);
    node(name, &[x], made, true, with_result(backward))
}

/// Like [`Tensor::apply_op2`].
pub fn apply2<C: CustomOp2 + Send + Sync + 'static>(a: &Tensor, b: &Tensor, op: C) -> Result<Tensor> {
    if !has_ticket(&[a, b]) {
        return a.apply_op2(b, op);
    }
    let made = with_storage(a, |a, a_l| with_storage(b, |b, b_l| op.cpu_fwd(a, a_l, b, b_l)))?;
    let (name, inputs) = (op.name(), [a, b].map(Tensor::clone));
    let backward = move |result: &Tensor, grad: &Tensor| {
        let (a, b) = op.bwd(&inputs[0], &inputs[1], result, grad)?;
        Ok([a, b, None])
    };
    node(name, &[a, b], made, true, with_result(backward))
}

/// Like [`Tensor::apply_op3`].
pub fn apply3<C: CustomOp3 + Send + Sync + 'static>(
    a: &Tensor,
    b: &Tensor,
    c: &Tensor,
    op: C,
) -> Result<Tensor> {
    if !has_ticket(&[a, b, c]) {
        return a.apply_op3(b, c, op);
    }
    let made = with_storage(a, |a, a_l| {
        with_storage(b, |b, b_l| with_storage(c, |c, c_l| op.cpu_fwd(a, a_l, b, b_l, c, c_l)))
    })?;
    let (name, inputs) = (op.name(), [a, b, c].map(Tensor::clone));
    let backward = move |result: &Tensor, grad: &Tensor| {
        let (a, b, c) = op.bwd(&inputs[0], &inputs[1], &inputs[2], result, grad)?;
        Ok([a, b, c])
    };
    node(name, &[a, b, c], made, true, with_result(backward))
}

/// Like [`Tensor::reshape`]. Uses of the result put their gradients into the slot of `x`, if `x` has one.
pub fn reshape(x: &Tensor, shape: impl Into<Shape>) -> Result<Tensor> {
    let view = x.reshape(shape.into())?;
    if let Some(holder) = holder_of(x) {
        remember(&view, &holder);
    }
    Ok(view)
}

/// Like [`Tensor::to_dtype`]. The node of the result does not hold `x`.
pub fn to_dtype(x: &Tensor, dtype: DType) -> Result<Tensor> {
    let from = x.dtype();
    if from == dtype || !has_ticket(&[x]) {
        return x.to_dtype(dtype);
    }
    let made = with_storage(x, |storage, layout| Ok((storage.to_dtype(layout, dtype)?, x.shape().clone())))?;
    record("to_dtype", &[x], made, move |grad| Ok([Some(grad.to_dtype(from)?), None, None]))
}

/// The backward step of an op that reads its result.
fn with_result(backward: impl Fn(&Tensor, &Tensor) -> Result<Grads> + Send + Sync + 'static) -> BackwardFn {
    Box::new(move |result, grad| match result {
        Some(result) => backward(result, grad),
        None => bail!("the backward step of an op met no result"),
    })
}

fn with_storage<R>(x: &Tensor, f: impl FnOnce(&CpuStorage, &Layout) -> Result<R>) -> Result<R> {
    let (storage, layout) = x.storage_and_layout();
    match &*storage {
        Storage::Cpu(storage) => f(storage, layout),
        _ => bail!("expected a tensor on the CPU, as the first input of the op"),
    }
}
