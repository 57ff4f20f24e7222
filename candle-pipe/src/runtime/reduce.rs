//! Reductions of the gradients of one parameter on several ranks: shared by stages, or on replicas of the model.
use super::Runtime;
use crate::{Error, Result, Value, grads};
use candle_core::backprop::GradStore;
use candle_core::{Tensor, TensorId};
use candle_dist::{Collective, PendingGrads, ReduceOp, empty, rows, sum_dtype};
use std::collections::{HashMap, HashSet};

/// The reductions of one step.
pub(super) struct GradReductions<'a> {
    runtime: &'a Runtime,
    started: HashMap<usize, PendingGrads>,
}

impl<'a> GradReductions<'a> {
    pub(super) fn new(runtime: &'a Runtime) -> Self {
        Self { runtime, started: HashMap::new() }
    }

    /// Sums the gradients of parameters that stages on several ranks have copies of. A missing gradient counts as zeros; one
    /// that is missing on all ranks stays missing, as on one device.
    pub(super) fn shared(&self, group: usize, grads: &mut GradStore) -> Result<()> {
        let shared = &self.runtime.shared[group];
        // Stages on one rank share one copy, whose gradients are summed already.
        let Some(ranks) = shared.ranks.as_ref().filter(|_| !shared.parameters.is_empty()) else {
            return Ok(());
        };
        let grad = |parameter: &Tensor| {
            let dtype = sum_dtype(parameter.dtype());
            match grads.get(parameter) {
                Some(grad) => empty::compute(&grad.detach(), |grad| grad.to_dtype(dtype)),
                None => Tensor::zeros(parameter.shape(), dtype, parameter.device()),
            }
        };
        let mut mine = shared.parameters.iter().map(grad).collect::<candle_core::Result<Vec<_>>>()?;
        let present =
            shared.parameters.iter().map(|parameter| f32::from(u8::from(grads.get(parameter).is_some())));
        let has_changed = shared.changes.iter().any(|changes| !changes.is_empty());
        let present = present.chain([f32::from(u8::from(has_changed))]);
        mine.push(Tensor::from_iter(present, shared.parameters[0].device())?);
        let mut sums = ranks.call(Collective::AllReduce(ReduceOp::Sum)).run_all(&mine)?;
        let present = sums.pop().map(|present| Ok::<_, Error>(ranks.to_host(&present)?.to_vec1::<f32>()?));
        let mut present = present.transpose()?.unwrap_or_default();
        if present.pop().is_some_and(|has_changed| has_changed > 0.0) {
            return Err(Error::Pipe(format!(
                "lookups change rows of {:?} in place, as max_norm does, and stages on other ranks have copies of it; look it up in \
                 stages of one rank, or do without max_norm",
                shared.name
            )));
        }
        for ((parameter, sum), present) in shared.parameters.iter().zip(sums).zip(present) {
            if present > 0.0 {
                grads.insert(parameter, sum);
            }
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

    /// Returns an error if there is a gradient of a variable that replicas cannot average, as no stage has it among its
    /// parameters.
    pub(super) fn check(&self, grads: &GradStore) -> Result<()> {
        if self.runtime.replicas.is_empty() {
            return Ok(());
        }
        let known = self.runtime.stages().flat_map(|stage| stage.variables().values());
        let known: HashSet<TensorId> = known.map(Tensor::id).collect();
        let Some(other) = grads.get_ids().find(|id| !known.contains(id)) else { return Ok(()) };
        if let Some(shape) = rows::shape_of_handle(*other) {
            return Err(Error::Pipe(format!(
                "a node looks up rows of a table {shape:?} whose gradient is kept by rows, which with_replicas does not average; \
                 use beside, and average all gradients by a DataParallel that has its RowVar::var"
            )));
        }
        grads.get_id(*other).map_or(Ok(()), |grad| {
            let grad = Value::from(grad);
            Err(Error::Pipe(format!(
                "a node computes with a variable whose gradient is {grad} and that no scope created, so its gradients are not \
                 averaged over the replicas; get it from the scope, or declare it with PipeBuilder::parameter, or use beside \
                 and average all gradients yourself"
            )))
        })
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
