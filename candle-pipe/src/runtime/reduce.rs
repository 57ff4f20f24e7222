//! Reductions of the gradients of one parameter on several ranks: shared by stages, or on replicas of the model.
use super::Runtime;
use crate::{Result, grads};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_dist::{PendingGrads, ReduceOp, sum_dtype};
use std::collections::HashMap;

/// The reductions of one step.
pub(super) struct Reductions<'a> {
    runtime: &'a Runtime,
    started: HashMap<usize, PendingGrads>,
}

impl<'a> Reductions<'a> {
    pub(super) fn new(runtime: &'a Runtime) -> Self {
        Self { runtime, started: HashMap::new() }
    }

    /// Sums the gradients of a parameter that stages on several ranks have copies of; a missing gradient counts as
    /// zeros.
    pub(super) fn shared(&self, group: usize, grads: &mut GradStore) -> Result<()> {
        let shared = &self.runtime.shared[group];
        // Stages on one rank share one copy, whose gradients are summed already.
        let Some(ranks) = &shared.ranks else { return Ok(()) };
        for parameter in &shared.parameters {
            let grad = grads.get(parameter).cloned();
            let zeros = || Tensor::zeros(parameter.shape(), sum_dtype(parameter.dtype()), parameter.device());
            let grad = grad.map_or_else(zeros, Ok)?;
            grads.insert(parameter, ranks.all_reduce(&grad.detach(), ReduceOp::Sum)?);
        }
        Ok(())
    }

    /// Starts to average the gradients of a stage over the replicas of the model.
    pub(super) fn start(&mut self, stage: usize, grads: &mut GradStore) -> Result<()> {
        if let Some(replicas) = self.runtime.replicas.get(&stage) {
            self.started.insert(stage, replicas.reduce_start(grads)?);
        }
        Ok(())
    }

    /// Waits for the average that [`start`](Self::start) started, and adds it to the gradients of the same parameters
    /// from later stages.
    pub(super) fn finish(&mut self, stage: usize, grads: &mut GradStore) -> Result<()> {
        let Some(started) = self.started.remove(&stage) else { return Ok(()) };
        let mut means = GradStore::default();
        started.wait(&mut means)?;
        grads::add(grads, &means)
    }
}
