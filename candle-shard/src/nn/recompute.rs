//! Recomputation of activations in the backward pass.
use crate::autograd::order::NodeSpan;
use crate::autograd::{backward_of_part, counts, hooks, nesting, off_graph};
use crate::kernels::{WeightSink, weight_sink, with_weight_sink};
use crate::layout::Axes;
use crate::nn::Draws;
use crate::nn::lora::AdapterScope;
use crate::{DTensor, Error, Result};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Shape, Tensor, Var};
use candle_dist::backend::{Fresh, Ready};
use candle_dist::bits::same_elements;
use candle_dist::edges;
use std::sync::{Arc, OnceLock};

/// Computes `f(x)` without keeping its activations. The backward pass computes `f` a second time
/// (activation checkpointing, Chen et al. 2016; PyTorch's `torch.utils.checkpoint`).
///
/// `f` may use parameters, and capture any other tensors with a gradient. It runs twice, so it must not change variables;
/// [`BatchNorm`](crate::nn::BatchNorm) and [`MoE`](crate::nn::MoE) change theirs once. The gradients of parameters and of
/// captured tensors are in the result of [`DTensor::backward`], but not of candle's own `backward` on a local tensor. If `x`
/// has no gradient, nothing is recomputed and this is `f(x)`.
///
/// # Errors
/// Those of `f`. In the backward pass, if `f` returns other numbers the second time, as with `candle_nn::Dropout`: its
/// gradients would be those of another function.
#[doc(alias = "checkpoint")]
pub fn recompute(
    x: &DTensor,
    f: impl Fn(&DTensor) -> Result<DTensor> + Send + Sync + 'static,
) -> Result<DTensor> {
    if !x.tracked() {
        return f(x);
    }
    let leaf = x.as_leaf()?.0;
    let (out, draws) = Draws::of(|| f(&leaf))?;
    let (spec, varying) = (out.shared_spec().clone(), out.varying());
    let made = Ready::new(Fresh::copy_of(out.to_local())?);
    // Without the graph, so that no activations are kept.
    let out = out.detach();
    counts::segment_made();
    let span = Arc::<OnceLock<NodeSpan>>::default();
    let op = Recompute {
        f: Box::new(f),
        draws,
        adapters: AdapterScope::current(),
        x: x.clone(),
        varying,
        made,
        sink: weight_sink(),
        span: span.clone(),
    };
    let (made, nodes) = NodeSpan::of(|| edges::apply1(x.to_local(), op))?;
    span.get_or_init(|| nodes);
    Ok(DTensor::computed(made?, spec, varying, &[out]))
}

type SegmentFn = Box<dyn Fn(&DTensor) -> Result<DTensor> + Send + Sync>;

struct Recompute {
    f: SegmentFn,
    draws: Draws,
    /// The adapters that run in the segment.
    adapters: AdapterScope,
    x: DTensor,
    varying: Axes,
    made: Ready,
    /// The receiver of weight gradients, also for the recomputation.
    sink: Option<Arc<dyn WeightSink>>,
    /// The nodes of the segment in the graph around it.
    span: Arc<OnceLock<NodeSpan>>,
}

impl CustomOp1 for Recompute {
    fn name(&self) -> &'static str {
        "recompute"
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.made.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.made.cuda()
    }

    fn bwd(&self, _: &Tensor, made: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        hooks::nested_begins(self.span.get().and_then(|span| span.place()))?;
        nesting::nested(|| self.backward(made, grad)).map(Some)
    }
}

impl Recompute {
    /// Returns the gradient of the input. Those of parameters go to the outermost backward pass.
    fn backward(&self, made: &Tensor, grad: &Tensor) -> candle_core::Result<Tensor> {
        let (x, leaf) = self.x.as_leaf()?;
        let again = || self.adapters.run(|| (self.f)(&x));
        let run = || nesting::recomputing(|| self.draws.again(again));
        let out = match &self.sink {
            Some(sink) => with_weight_sink(sink.clone(), run),
            None => run(),
        }?;
        if !same_elements(made, out.to_local())? {
            let reason = "the segment gave other numbers when the backward pass ran it again; its gradients would be those of \
                          another function. Draw random numbers by name and step, as DTensor::dropout does, or keep the segment's \
                          activations";
            return Error::op("recompute", reason).map_err(Into::into);
        }
        debug_assert_eq!(out.varying(), self.varying);
        // A scalar whose gradient with respect to the segment's output is the incoming gradient.
        let loss = (out.to_local() * grad)?.sum_all()?;
        let mut grads = backward_of_part(&loss)?;
        // A nested segment may have captured the input and found a part of its gradient.
        if let Some(grad) = grads.remove(&leaf) {
            off_graph::add(leaf.id(), &grad)?;
        }
        let mine = off_graph::take(leaf.id());
        for &variable in grads.get_ids() {
            if let Some(grad) = grads.get_id(variable) {
                off_graph::add(variable, grad)?;
            }
        }
        mine.map_or_else(|| leaf.zeros_like(), |grad| grad.to_dtype(leaf.dtype()))
    }
}

impl DTensor {
    /// Copies the values to a new variable, so that a part of a graph can be differentiated by itself. Both runs of a segment get one: kernels
    /// whose bits depend on whether there is a graph, such as products of few rows, then give the same ones, also of frozen weights.
    fn as_leaf(&self) -> Result<(DTensor, Var)> {
        self.check_memory("recompute")?;
        let var = Var::from_tensor(&self.to_local().detach())?;
        // Not the variable itself, so that several uses share one view of it, as they do outside of a segment.
        let local = var.reshape(var.shape())?;
        let from = std::slice::from_ref(self);
        Ok((DTensor::computed(local, self.shared_spec().clone(), self.varying(), from), var))
    }
}
