//! Gradients of one parameter on several ranks: shared by stages, or of replicas of the model.
use super::Runtime;
use crate::Result;
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_dist::{Pending, ReduceOp};
use std::collections::HashMap;

/// The reductions of one step.
pub(super) struct Reductions<'a> {
    runtime: &'a Runtime,
    started: HashMap<usize, Vec<(Tensor, Pending)>>,
}

impl<'a> Reductions<'a> {
    pub(super) fn new(runtime: &'a Runtime) -> Self {
        Self { runtime, started: HashMap::new() }
    }

    /// Sums the gradients of a parameter that stages on several ranks have copies of.
    pub(super) fn shared(&self, group: usize, grads: &mut GradStore) -> Result<()> {
        let shared = &self.runtime.shared[group];
        // Stages of one rank have one copy, whose gradients are summed already.
        let Some(ranks) = &shared.ranks else { return Ok(()) };
        for parameter in &shared.parameters {
            let sum = ranks.all_reduce(&gradient(parameter, grads)?, ReduceOp::Sum)?;
            grads.insert(parameter, sum);
        }
        Ok(())
    }

    /// Begins to average the gradients of a stage over the replicas of the model.
    pub(super) fn start(&mut self, stage: usize, grads: &GradStore) -> Result<()> {
        let Some(replicas) = &self.runtime.replicas else { return Ok(()) };
        let mut started = Vec::new();
        let parameters = self.runtime.stage(stage)?.parameters().values();
        for parameter in parameters.filter(|parameter| parameter.is_variable()) {
            let mean = replicas.all_reduce_start(&gradient(parameter, grads)?, ReduceOp::Avg)?;
            started.push((parameter.clone(), mean));
        }
        self.started.insert(stage, started);
        Ok(())
    }

    /// Waits for what [`start`](Self::start) began.
    pub(super) fn finish(&mut self, stage: usize, grads: &mut GradStore) -> Result<()> {
        for (parameter, mean) in self.started.remove(&stage).unwrap_or_default() {
            grads.insert(&parameter, mean.wait()?);
        }
        Ok(())
    }
}

/// The gradient of a parameter; zeros if nothing reached it.
fn gradient(parameter: &Tensor, grads: &GradStore) -> Result<Tensor> {
    Ok(grads.get(parameter).cloned().map_or_else(|| parameter.zeros_like(), Ok)?.detach())
}
