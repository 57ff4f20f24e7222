//! Custom ops of candle as nodes with tickets, and views of tensors that have tickets.
use super::node::{BackwardFn, Grads, node, node_of_two};
use super::value::{path_of, remember};
use crate::fresh::Fresh;
use candle_core::{CustomOp1, CustomOp2, CustomOp3, Device, Result, Shape, Storage, Tensor, bail};
use std::sync::OnceLock;

/// Returns whether a result of `inputs` gets a ticket: if it needs a gradient and all are on the CPU, or on one CUDA device. With
/// `CANDLE_DIST_COMPOSED=1`, which is read once, none on a CUDA device does: fused kernels there are off, too.
pub fn has_ticket(inputs: &[&Tensor]) -> bool {
    static IS_OFF: OnceLock<bool> = OnceLock::new();
    let is_off = || std::env::var("CANDLE_GRAD_DO_NOT_DETACH").is_ok_and(|set| !set.is_empty() && set != "0");
    static IS_COMPOSED: OnceLock<bool> = OnceLock::new();
    let is_composed = || std::env::var_os("CANDLE_DIST_COMPOSED").is_some_and(|set| set == "1");
    let has_tickets = |device: &Device| match device {
        Device::Cpu => true,
        Device::Cuda(_) => !*IS_COMPOSED.get_or_init(is_composed),
        Device::Metal(_) => false,
    };
    let device = inputs[0].device();
    inputs.iter().any(|x| x.track_op())
        && has_tickets(device)
        && inputs.iter().all(|x| x.device().same_device(device))
        && !*IS_OFF.get_or_init(is_off)
}

/// Returns the result of an op on one to three inputs as a node of the graph. It is on their device.
///
/// `backward` returns the gradients of the inputs from the gradient of the result, which is contiguous. Each tracked
/// input that is not a variable must get one. The memory of the result is free when its last use is gone.
///
/// Call it only if [`has_ticket`].
pub fn record(
    name: &'static str,
    inputs: &[&Tensor],
    made: Fresh,
    backward: impl Fn(&Tensor) -> Result<Grads> + Send + Sync + 'static,
) -> Result<Tensor> {
    node(name, inputs, made, false, Box::new(move |_, grad| backward(grad)))
}

/// Like [`record`], for an op with two results. `backward` gets the gradients of those that the loss depends on, in any strides.
pub fn record_both(
    name: &'static str,
    inputs: &[&Tensor],
    made: [Fresh; 2],
    backward: impl Fn([Option<&Tensor>; 2]) -> Result<Grads> + Send + Sync + 'static,
) -> Result<[Tensor; 2]> {
    node_of_two(name, inputs, made, Box::new(backward))
}

/// Like [`record`], for a `backward` that also gets the result.
pub fn record_with_result(
    name: &'static str,
    inputs: &[&Tensor],
    made: Fresh,
    backward: impl Fn(&Tensor, &Tensor) -> Result<Grads> + Send + Sync + 'static,
) -> Result<Tensor> {
    node(name, inputs, made, true, with_result(backward))
}

/// Like [`Tensor::apply_op1`].
pub fn apply1<C: CustomOp1 + Send + Sync + 'static>(x: &Tensor, op: C) -> Result<Tensor> {
    if !has_ticket(&[x]) {
        return x.apply_op1(op);
    }
    let made = {
        let (s, l) = x.storage_and_layout();
        match &*s {
            Storage::Cpu(s) => of(op.cpu_fwd(s, l)?, Storage::Cpu),
            Storage::Cuda(s) => of(op.cuda_fwd(s, l)?, Storage::Cuda),
            Storage::Metal(_) => return elsewhere(op.name()),
        }
    };
    let (name, input) = (op.name(), x.clone());
    let backward = move |result: &Tensor, grad: &Tensor| Ok([op.bwd(&input, result, grad)?, None, None]);
    node(name, &[x], made, true, with_result(backward))
}

/// Like [`Tensor::apply_op2`].
pub fn apply2<C: CustomOp2 + Send + Sync + 'static>(a: &Tensor, b: &Tensor, op: C) -> Result<Tensor> {
    if !has_ticket(&[a, b]) {
        return a.apply_op2(b, op);
    }
    let made = {
        let ((a, a_l), (b, b_l)) = (a.storage_and_layout(), b.storage_and_layout());
        match (&*a, &*b) {
            (Storage::Cpu(a), Storage::Cpu(b)) => of(op.cpu_fwd(a, a_l, b, b_l)?, Storage::Cpu),
            (Storage::Cuda(a), Storage::Cuda(b)) => of(op.cuda_fwd(a, a_l, b, b_l)?, Storage::Cuda),
            _ => return elsewhere(op.name()),
        }
    };
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
    let made = {
        let ((a, a_l), (b, b_l), (c, c_l)) =
            (a.storage_and_layout(), b.storage_and_layout(), c.storage_and_layout());
        match (&*a, &*b, &*c) {
            (Storage::Cpu(a), Storage::Cpu(b), Storage::Cpu(c)) => {
                of(op.cpu_fwd(a, a_l, b, b_l, c, c_l)?, Storage::Cpu)
            }
            (Storage::Cuda(a), Storage::Cuda(b), Storage::Cuda(c)) => {
                of(op.cuda_fwd(a, a_l, b, b_l, c, c_l)?, Storage::Cuda)
            }
            _ => return elsewhere(op.name()),
        }
    };
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
    if let Some(path) = path_of(x) {
        remember(&view, path.reshaped(x.shape()));
    }
    Ok(view)
}

/// Like [`Tensor::permute`]. Uses of the result put their gradients into the slot of `x`, if `x` has one.
pub fn permute(x: &Tensor, dims: &[usize]) -> Result<Tensor> {
    let view = x.permute(dims)?;
    if let Some(path) = path_of(x) {
        remember(&view, path.permuted(dims));
    }
    Ok(view)
}

/// Like [`Tensor::contiguous`]. Uses of the result put their gradients into the slot of `x`, if `x` has one.
pub fn contiguous(x: &Tensor) -> Result<Tensor> {
    let made = x.contiguous()?;
    if made.id() != x.id()
        && let Some(path) = path_of(x)
    {
        remember(&made, path);
    }
    Ok(made)
}

/// The backward step of an op that reads its result.
fn with_result(backward: impl Fn(&Tensor, &Tensor) -> Result<Grads> + Send + Sync + 'static) -> BackwardFn {
    Box::new(move |result, grad| match result {
        Some(result) => backward(result, grad),
        None => bail!("the backward step of an op met no result"),
    })
}

fn of<S>((storage, shape): (S, Shape), on: impl FnOnce(S) -> Storage) -> Fresh {
    Fresh { storage: on(storage), shape }
}

fn elsewhere<T>(name: &str) -> Result<T> {
    bail!("{name}: expected all inputs on the CPU or on one CUDA device")
}
