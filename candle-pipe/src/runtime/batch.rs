//! The batch of a step, checked before any communication.
use super::Runtime;
use super::clock::Nanos;
use crate::graph::{Inputs, Loss, LossReduction, ValueId};
use crate::microbatch::{MaskedRows, Microbatches};
use crate::schedule::Program;
use crate::tape::Keep;
use crate::{Error, Result, StepOptions, Value};
use candle_core::Tensor;
use candle_dist::TensorTree;
use std::collections::HashSet;
use std::ops::Range;

/// The inputs, rows and weights of all microbatches, and how they are run.
pub(super) struct StepBatch<'a> {
    pub(super) inputs: Vec<Inputs>,
    pub(super) rows: Vec<Range<usize>>,
    pub(super) masked: Vec<Option<MaskedRows>>,
    pub(super) weights: Vec<f64>,
    /// The number of rows of the whole batch of this copy of the model.
    pub(super) all_rows: usize,
    /// The factor of the gradients for which their mean over the copies is that of the batch of all copies.
    pub(super) share: f64,
    pub(super) options: &'a StepOptions,
    /// Whether dropout is active.
    pub(super) training: bool,
    /// The data that each stage keeps for the backward pass.
    pub(super) keep: Vec<Keep>,
    /// Whether there are backward passes.
    pub(super) backward: bool,
    /// The time at which the last rank reached the step.
    pub(super) began: Nanos,
}

impl<'a> StepBatch<'a> {
    pub(super) fn new(
        runtime: &Runtime,
        program: &Program,
        cut: &Microbatches,
        options: &'a StepOptions,
        backward: bool,
    ) -> Result<Self> {
        match backward {
            true => StepOptions::check_synced()?,
            false => options.check_evaluation()?,
        }
        let (training, keep) =
            (options.is_training(backward), options.keep_by_stage(runtime.info.stages.len())?);
        let microbatches = program.schedule().microbatches();
        // A batch of fewer rows than that cannot be cut into as many; the others are left out.
        let is_short = cut.len() < microbatches && cut.rows().iter().all(|&rows| rows == 1);
        if cut.len() != microbatches && !is_short {
            let reason = format!("{} microbatches for a schedule of {microbatches}", cut.len());
            return Err(Error::Microbatches(format!(
                "{reason}; cut the batch into as many, or use another schedule"
            )));
        }
        if options.split_backward {
            let reason = "split_backward on ranks, where the schedule defines the split; leave it out, and use a \
                          schedule with W, such as zb-h1";
            return Err(Error::Schedule(reason.into()));
        }
        let used = runtime.stages.values().flat_map(|stage| &stage.def().inputs);
        let used: HashSet<ValueId> =
            used.filter(|input| input.from.is_none()).map(|input| input.value).collect();
        let bind = |(args, kwargs)| runtime.signature.bind_for(args, kwargs, |input| used.contains(&input));
        let inputs: Vec<Inputs> = cut.iter().map(bind).collect::<Result<_>>()?;
        let mut values = inputs.iter().flatten();
        let refuses = backward && !runtime.is_alone();
        let tracked = values.find(|(_, input)| refuses && input.tensors().into_iter().any(Tensor::track_op));
        if let Some((&value, _)) = tracked {
            let name = runtime.info.graph.value_name(value);
            let reason = format!("input {name:?} is tracked, but ranks compute no gradients of inputs");
            return Err(Error::Pipe(format!("{reason}; detach it, or make it a parameter of a node")));
        }
        let (rows, weights) =
            (cut.row_ranges(options.first_row), options.loss_weights(cut, runtime.info.graph.loss)?);
        let masked = MaskedRows::of(cut, options.first_row, &runtime.info.graph, &runtime.signature)?;
        let all_rows = cut.rows().iter().sum();
        let (share, began) = (1.0, 0);
        Ok(Self { inputs, rows, masked, weights, all_rows, share, options, training, keep, backward, began })
    }

    /// Sets the share of this copy of the model from the numbers of rows of all `copies`.
    ///
    /// A mean is over the rows of all copies, and a sum is over all copies. Weights of the caller and losses that count are
    /// complete without it.
    pub(super) fn share_of(&mut self, loss: Option<Loss>, copies: &[i64]) {
        let (count, all) = (copies.len() as f64, copies.iter().sum::<i64>() as f64);
        self.share = match loss.map(|loss| loss.reduction) {
            Some(LossReduction::Mean) if self.options.weights.is_none() && all > 0.0 => {
                count * self.all_rows as f64 / all
            }
            Some(LossReduction::Sum) if self.options.weights.is_none() => count,
            _ => 1.0,
        };
    }

    pub(super) fn len(&self) -> usize {
        self.rows.len()
    }

    pub(super) fn input(&self, microbatch: usize, value: ValueId) -> Result<Value> {
        let missing = || Error::Pipe(format!("input {value} is missing"));
        self.inputs[microbatch].get(&value).cloned().ok_or_else(missing)
    }
}
