//! What a step is to do, and what it gives.
use crate::graph::{Loss, Reduction};
use crate::microbatch::Microbatches;
use crate::tape::{Keep, parts};
use crate::{Error, Result, Value};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};

/// How a training step runs.
#[derive(Debug, Clone)]
pub struct StepOptions {
    /// The number of the step, which random streams are folded with.
    pub step: u64,
    /// The place of the batch's first row in a larger batch that is trained on at once, of which replicas of the model
    /// have the other rows: random numbers are those of the larger one.
    pub first_row: usize,
    /// Whether dropout drops.
    pub training: bool,
    /// What stages keep for the backward pass.
    pub keep: Keep,
    /// Whether weight gradients are computed after all input gradients instead of beside them. For [`LocalPipe`]: on ranks
    /// the schedule says it.
    ///
    /// [`LocalPipe`]: crate::LocalPipe
    pub split_backward: bool,
    /// Whether the step keeps the outputs of all microbatches.
    pub outputs: bool,
    /// What the loss of each microbatch counts; by default, its share of the rows for means and 1 for sums. A loss that
    /// [counts](Reduction::Counted) takes none.
    pub weights: Option<Vec<f64>>,
}

impl Default for StepOptions {
    fn default() -> Self {
        let (keep, split_backward) = (Keep::Activations, false);
        Self { step: 0, first_row: 0, training: true, keep, split_backward, outputs: true, weights: None }
    }
}

impl StepOptions {
    /// What the loss of each microbatch counts.
    pub(crate) fn weights(&self, batch: &Microbatches, loss: Option<Loss>) -> Result<Vec<f64>> {
        match (&self.weights, loss.map(|loss| loss.reduction)) {
            (Some(_), Some(Reduction::Counted)) => {
                Err(Error::Pipe("weights for a loss that counts by itself; leave them out, or make it a sum".into()))
            }
            (Some(weights), _) if weights.len() == batch.len() => Ok(weights.clone()),
            (Some(weights), _) => {
                let reason = format!("{} weights for {} microbatches; give one for each", weights.len(), batch.len());
                Err(Error::Pipe(reason))
            }
            (None, Some(Reduction::Sum | Reduction::Counted)) => Ok(vec![1.0; batch.len()]),
            (None, _) => Ok(batch.weights()),
        }
    }
}

/// What a step gave. Nothing in it holds a graph.
#[derive(Debug, Default)]
pub struct Step {
    /// The loss of each microbatch, as the model gave it; the sums of a loss that [counts](Reduction::Counted).
    pub losses: Vec<Tensor>,
    /// What the loss of each microbatch counts, where it [says so](Reduction::Counted).
    pub counts: Vec<f64>,
    /// The outputs of each microbatch, a map by name; [`Microbatches::merge`] joins them.
    pub outputs: Vec<Value>,
    /// The gradients of all variables that the loss was computed from; f32 for 16-bit variables, see
    /// [`round_grads`](candle_dist::round_grads).
    pub grads: GradStore,
    total: Option<Tensor>,
}

/// The losses of many microbatches and what they count, each added up.
pub(crate) type Counted = [f64; 2];

impl Step {
    pub(crate) fn with_grads(grads: GradStore) -> Self {
        Self { grads, ..Self::default() }
    }

    /// The loss of the batch; of all replicas' batches, if it [counts](Reduction::Counted).
    ///
    /// # Errors
    /// [`Error::Pipe`] if the model has none.
    pub fn loss(&self) -> Result<&Tensor> {
        self.total.as_ref().ok_or_else(|| Error::Pipe("the model has no loss".into()))
    }

    pub(crate) fn add_loss(&mut self, loss: &Value, reduction: Reduction, weight: f64) -> Result<()> {
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

    /// All losses and what they count; a count that is none makes the sum of counts none.
    pub(crate) fn counted(&self) -> Result<Counted> {
        let valid = |&count: &f64| if count >= 0.0 { count } else { f64::NAN };
        let mut sum = 0.0;
        for loss in &self.losses {
            sum += loss.to_dtype(DType::F64)?.to_scalar::<f64>()?;
        }
        Ok([sum, self.counts.iter().map(valid).sum()])
    }

    /// Divides the loss and the gradients by what all losses count, `all`; gradients are then `times` larger.
    pub(crate) fn divide(&mut self, [sum, count]: Counted, times: f64) -> Result<()> {
        if !(count.is_finite() && count > 0.0) {
            let reason =
                "want finite numbers from 0, not all of them 0; leave out batches that have nothing to learn from";
            return Err(Error::Pipe(format!("the losses of the batch count {count}: {reason}")));
        }
        if let Some(loss) = self.losses.first() {
            let total = Tensor::new(sum / count, &Device::Cpu)?.to_dtype(loss.dtype())?;
            self.total = Some(total.to_device(loss.device())?);
        }
        for id in self.grads.get_ids().copied().collect::<Vec<_>>() {
            if let Some(grad) = self.grads.get_id(id) {
                let mean = grad.affine(times / count, 0.0)?;
                self.grads.insert_id(id, mean);
            }
        }
        Ok(())
    }
}

/// A count as a number.
fn number(count: &Value) -> Result<f64> {
    Ok(match count {
        Value::Int(count) => *count as f64,
        Value::Tensor(count) => count.flatten_all()?.to_dtype(DType::F64)?.to_vec1::<f64>()?[0],
        count => count.float()?,
    })
}
