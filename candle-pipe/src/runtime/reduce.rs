//! Gradients of one parameter on several ranks: shared by stages, or of replicas of the model.
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

    /// Sums the gradients of a parameter that stages on several ranks have copies of; one without counts as zeros.
    pub(super) fn shared(&self, group: usize, grads: &mut GradStore) -> Result<()> {
        let shared = &self.runtime.shared[group];
        // Stages of one rank have one copy, whose gradients are summed already.
        let Some(ranks) = &shared.ranks else { return Ok(()) };
        for parameter in &shared.parameters {
            let grad = grads.get(parameter).cloned();
            let zeros = || Tensor::zeros(parameter.shape(), sum_dtype(parameter.dtype()), parameter.device());
            let grad = grad.map_or_else(zeros, Ok)?;
            grads.insert(parameter, ranks.all_reduce(&grad.detach(), ReduceOp::Sum)?);
        }
        Ok(())
    }

    /// Begins to average the gradients of a stage over the replicas of the model.
    pub(super) fn start(&mut self, stage: usize, grads: &mut GradStore) -> Result<()> {
        if let Some(replicas) = self.runtime.replicas.get(&stage) {
            self.started.insert(stage, replicas.reduce_start(grads)?);
        }
        Ok(())
    }

    /// Waits for what [`start`](Self::start) began, and adds it to what later stages found for the same parameters.
    pub(super) fn finish(&mut self, stage: usize, grads: &mut GradStore) -> Result<()> {
        let Some(started) = self.started.remove(&stage) else { return Ok(()) };
        let mut means = GradStore::default();
        started.wait(&mut means)?;
        grads::add(grads, &means)
    }
}
