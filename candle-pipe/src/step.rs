//! Options and results of a training step.
use crate::graph::{Loss, LossReduction};
use crate::microbatch::Microbatches;
use crate::tape::{Keep, parts};
use crate::{Error, Result, Value};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_dist::rows;

/// The options of a training step or an evaluation: start from the default, and set what differs.
///
/// ```
/// use candle_pipe::{Keep, StepOptions};
///
/// let options = StepOptions::default().step(3).keep(Keep::Inputs);
/// assert_eq!((options.step, options.keep), (3, vec![Keep::Inputs]));
/// // The first of two stages has the most microbatches under way.
/// let options = StepOptions::default().keep([Keep::Inputs, Keep::Activations]);
/// assert_eq!(options.keep.len(), 2);
/// ```
///
/// An evaluation refuses those that it cannot heed: [`keep`](field@Self::keep), [`split_backward`](field@Self::split_backward),
/// [`loss_scale`](field@Self::loss_scale), and `training(true)`.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct StepOptions {
    /// The number of the step, which is folded into random streams.
    pub step: u64,
    /// The index of the batch's first row in the larger batch that the replicas of the model share. Random numbers are
    /// those of the larger batch.
    pub first_row: usize,
    /// Whether dropout is active; by default it is in a training step, and not in an evaluation.
    pub training: Option<bool>,
    /// The data that stages keep for the backward pass: one value for all stages, or one for each. If empty, all activations.
    /// Every rank gives the same.
    pub keep: Vec<Keep>,
    /// Whether weight gradients are computed after all input gradients. For [`LocalPipe`] only: on ranks the schedule
    /// decides this.
    ///
    /// [`LocalPipe`]: crate::LocalPipe
    pub split_backward: bool,
    /// Whether the step keeps the outputs of all microbatches.
    pub outputs: bool,
    /// The weight of each microbatch's loss; by default its share of the rows for means, and 1 for sums. Not allowed
    /// for a loss that [counts](LossReduction::Counted).
    pub weights: Option<Vec<f64>>,
    /// The factor of all gradients, and not of the loss: PyTorch's `GradScaler.scale`. Backward passes begin with it, so that
    /// gradients which 16-bit floats would round to zero are kept. Divide the gradients by it before a step of an optimizer. Every
    /// rank gives the same.
    pub loss_scale: f64,
}

impl Default for StepOptions {
    fn default() -> Self {
        Self {
            step: 0,
            first_row: 0,
            training: None,
            keep: Vec::new(),
            split_backward: false,
            outputs: true,
            weights: None,
            loss_scale: 1.0,
        }
    }
}

impl From<Keep> for Vec<Keep> {
    fn from(keep: Keep) -> Self {
        vec![keep]
    }
}

impl StepOptions {
    /// Sets the number of the step.
    pub fn step(self, step: u64) -> Self {
        Self { step, ..self }
    }

    /// Sets the index of the batch's first row in the larger batch of all replicas.
    pub fn first_row(self, first_row: usize) -> Self {
        Self { first_row, ..self }
    }

    /// Sets whether dropout is active.
    pub fn training(self, training: bool) -> Self {
        Self { training: Some(training), ..self }
    }

    /// Sets the data that stages keep for the backward pass: a [`Keep`] for all stages, or a list or array with one for each.
    pub fn keep(self, keep: impl Into<Vec<Keep>>) -> Self {
        Self { keep: keep.into(), ..self }
    }

    /// Sets whether weight gradients are computed after all input gradients.
    pub fn split_backward(self, split_backward: bool) -> Self {
        Self { split_backward, ..self }
    }

    /// Sets whether the step keeps the outputs of all microbatches.
    pub fn outputs(self, outputs: bool) -> Self {
        Self { outputs, ..self }
    }

    /// Sets the weight of each microbatch's loss.
    pub fn weights(self, weights: impl Into<Option<Vec<f64>>>) -> Self {
        Self { weights: weights.into(), ..self }
    }

    /// Sets the factor of all gradients.
    ///
    /// ```
    /// # use candle_core::{DType, Device, Tensor};
    /// # use candle_nn::{VarBuilder, VarMap};
    /// # use candle_pipe::microbatch::split_args_kwargs_into_chunks;
    /// # use candle_pipe::{EqualCount, In, Kwargs, LocalPipe, LossReduction, PipeBuilder, StepOptions, Value, nn};
    /// # let mut g = PipeBuilder::<VarBuilder<'static>>::new();
    /// # let x = g.input("x", In::Arg);
    /// # let y = g.module("up", |vb| Ok(nn::linear(1, 4, vb.clone())?), [x]);
    /// # g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
    /// # let pipe = g.finish(EqualCount(2))?;
    /// # let vars = VarMap::new();
    /// # let model = LocalPipe::new(&pipe, &VarBuilder::from_varmap(&vars, DType::F32, &Device::Cpu), &Device::Cpu)?;
    /// # let x = Value::from(&Tensor::ones((4, 1), DType::F32, &Device::Cpu)?);
    /// # let batch = split_args_kwargs_into_chunks(&[x], &Kwargs::new(), 2, None, None)?;
    /// let plain = model.forward_backward(&batch, &StepOptions::default())?;
    /// let scaled = model.forward_backward(&batch, &StepOptions::default().loss_scale(1024.0))?;
    /// assert_eq!(plain.loss()?.to_scalar::<f32>()?, scaled.loss()?.to_scalar::<f32>()?);
    /// for var in vars.all_vars() {
    ///     let [plain, scaled] = [&plain, &scaled].map(|made| made.grads.get(&var).expect("a gradient"));
    ///     assert_eq!((scaled / 1024.0)?.flatten_all()?.to_vec1::<f32>()?, plain.flatten_all()?.to_vec1::<f32>()?);
    /// }
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn loss_scale(self, loss_scale: f64) -> Self {
        Self { loss_scale, ..self }
    }

    /// Refuses a training step among backward passes that leave gradients of units on their ranks. A step scales the gradients of its
    /// microbatches by the rows or the count of all; those would come in with another factor, or without one.
    pub(crate) fn check_synced() -> Result<()> {
        #[cfg(feature = "shard")]
        if candle_shard::fsdp::keeps_grads() {
            let reason = "a training step of a pipeline within fsdp::no_sync, or before a backward pass has summed the gradients that \
                          no_sync has kept; give the step more microbatches, or add the gradients of several steps by a \
                          GradAccumulator; fsdp::discard_grads drops those that are kept";
            return Err(Error::Pipe(reason.into()));
        }
        Ok(())
    }

    /// Refuses options that an evaluation cannot heed.
    pub(crate) fn check_evaluation(&self) -> Result<()> {
        let option = match self {
            Self { training: Some(true), .. } => "training(true)",
            Self { split_backward: true, .. } => "split_backward",
            Self { loss_scale, .. } if *loss_scale != 1.0 => "loss_scale",
            Self { keep, .. } if !keep.is_empty() => "keep",
            _ => return Ok(()),
        };
        let reason = "in an evaluation, which has neither dropout nor backward passes; leave it out, or call forward_backward";
        Err(Error::Pipe(format!("{option} {reason}")))
    }

    /// Returns whether dropout is active, in a call that has `backward` passes or none.
    pub(crate) fn is_training(&self, backward: bool) -> bool {
        self.training.unwrap_or(backward)
    }

    /// Returns the data that each stage keeps.
    pub(crate) fn keep_by_stage(&self, stages: usize) -> Result<Vec<Keep>> {
        match self.keep.as_slice() {
            [] => Ok(vec![Keep::default(); stages]),
            [keep] => Ok(vec![*keep; stages]),
            keep if keep.len() == stages => Ok(keep.to_vec()),
            keep => {
                let reason = format!("keep has {} values for {stages} stages", keep.len());
                Err(Error::Pipe(format!("{reason}; give one for all stages, or one for each")))
            }
        }
    }

    /// Returns the weight of each microbatch's loss.
    pub(crate) fn loss_weights(&self, batch: &Microbatches, loss: Option<Loss>) -> Result<Vec<f64>> {
        match (&self.weights, loss.map(|loss| loss.reduction)) {
            (Some(_), Some(LossReduction::Counted)) => Err(Error::Pipe(
                "weights for a loss that counts by itself; leave them out, or make it a sum".into(),
            )),
            (Some(weights), _) if weights.len() == batch.len() => Ok(weights.clone()),
            (Some(weights), _) => {
                let reason =
                    format!("{} weights for {} microbatches; give one for each", weights.len(), batch.len());
                Err(Error::Pipe(reason))
            }
            (None, Some(LossReduction::Sum | LossReduction::Counted)) => Ok(vec![1.0; batch.len()]),
            (None, _) => Ok(batch.weights()),
        }
    }
}

/// The results of a step. They hold no graph.
#[derive(Debug, Default)]
#[non_exhaustive]
pub struct StepResult {
    /// The loss of each microbatch as computed by the model; the sums of a loss that [counts](LossReduction::Counted).
    pub losses: Vec<Tensor>,
    /// The count of each microbatch's loss, if it has [counts](LossReduction::Counted).
    pub counts: Vec<f64>,
    /// The outputs of each microbatch, a map by name; [`Microbatches::merge`] joins them.
    pub outputs: Vec<Value>,
    /// The gradients of all variables from which the loss was computed; f32 for 16-bit variables, see
    /// [`round_grads`](candle_dist::round_grads).
    pub grads: GradStore,
    total: Option<Tensor>,
    /// The rank that has the loss, on ranks of a pipeline.
    pub(crate) loss_rank: Option<usize>,
    /// The mark of the step's beginning, for gradients that tables keep by rows.
    since: u64,
}

/// The sum of the losses and the sum of the counts of many microbatches.
pub(crate) type CountedLoss = [f64; 2];

impl StepResult {
    /// Creates the result of a step that begins now.
    pub(crate) fn begin() -> Self {
        Self { since: rows::next_mark(), ..Self::default() }
    }

    /// Returns the loss of the batch; of all replicas' batches, if it [counts](LossReduction::Counted).
    ///
    /// # Errors
    /// [`Error::Pipe`] if the model has no loss, or another rank has it.
    pub fn loss(&self) -> Result<&Tensor> {
        self.total.as_ref().ok_or_else(|| {
            Error::Pipe(match self.loss_rank {
                Some(rank) => format!(
                    "the loss of this step is on rank {rank}, which has the last stage; Runtime::loss tells it to all ranks"
                ),
                None => "the model has no loss; declare it with loss or loss_fn".into(),
            })
        })
    }

    pub(crate) fn add_loss(&mut self, loss: &Value, reduction: LossReduction, weight: f64) -> Result<()> {
        let (loss, count) = parts(loss, reduction)?;
        if let Some(count) = count {
            self.counts.push(number(count)?);
        } else {
            let share = loss.affine(weight, 0.0)?;
            self.total = Some(match self.total.take() {
                Some(total) => (total + share)?,
                None => share,
            });
        }
        self.losses.push(loss.clone());
        Ok(())
    }

    /// Returns the sums of losses and counts; an invalid count makes the sum of counts NaN.
    pub(crate) fn counted(&self) -> Result<CountedLoss> {
        let valid = |&count: &f64| if count >= 0.0 { count } else { f64::NAN };
        let mut sum = 0.0;
        for loss in &self.losses {
            sum += loss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        }
        Ok([sum, self.counts.iter().map(valid).sum()])
    }

    /// Divides the loss and the gradients by the count of all losses, `all`; gradients are also multiplied by `times`.
    pub(crate) fn divide(&mut self, [sum, count]: CountedLoss, times: f64) -> Result<()> {
        if !(count.is_finite() && count > 0.0) {
            let reason = "expected finite numbers from 0, not all of them 0; leave out batches that have nothing to learn from";
            return Err(Error::Pipe(format!("the losses of the batch count {count}: {reason}")));
        }
        if let Some(loss) = self.losses.first() {
            let total = Tensor::new(sum / count, &Device::Cpu)?.to_dtype(loss.dtype())?;
            self.total = Some(total.to_device(loss.device())?);
        }
        rows::scale(&self.grads, self.since, times / count)?;
        for id in self.grads.get_ids().copied().collect::<Vec<_>>() {
            if let Some(grad) = self.grads.get_id(id) {
                let mean = grad.affine(times / count, 0.0)?;
                self.grads.insert_id(id, mean);
            }
        }
        Ok(())
    }
}

/// Returns a count as a number.
fn number(count: &Value) -> Result<f64> {
    Ok(match count {
        Value::Int(count) => *count as f64,
        Value::Tensor(count) => count.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?[0],
        count => count.float()?,
    })
}
