//! What a step is to do, and what it gives.
use crate::graph::{Loss, Reduction};
use crate::microbatch::Microbatches;
use crate::tape::{Keep, scalar};
use crate::{Error, Result, Value};
use candle_core::Tensor;
use candle_core::backprop::GradStore;

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
    /// Whether weight gradients are computed after all input gradients instead of beside them.
    pub split_backward: bool,
    /// What the loss of each microbatch counts; by default, its share of the rows for means and 1 for sums.
    pub weights: Option<Vec<f64>>,
}

impl Default for StepOptions {
    fn default() -> Self {
        let (keep, split_backward) = (Keep::Activations, false);
        Self { step: 0, first_row: 0, training: true, keep, split_backward, weights: None }
    }
}

impl StepOptions {
    /// What the loss of each microbatch counts.
    pub(crate) fn weights(&self, batch: &Microbatches, loss: Option<Loss>) -> Result<Vec<f64>> {
        match (&self.weights, loss.map(|loss| loss.reduction)) {
            (Some(weights), _) if weights.len() == batch.len() => Ok(weights.clone()),
            (Some(weights), _) => {
                let reason = format!("{} weights for {} microbatches; give one for each", weights.len(), batch.len());
                Err(Error::Pipe(reason))
            }
            (None, Some(Reduction::Sum)) => Ok(vec![1.0; batch.len()]),
            (None, Some(Reduction::Mean)) if batch.is_masked() => {
                let reason = "a mean over masked microbatches counts rows of zeros; use a sum, or train with weights of your own";
                Err(Error::Pipe(reason.into()))
            }
            (None, _) => Ok(batch.weights()),
        }
    }
}

/// What a step gave. Nothing in it holds a graph.
#[derive(Debug, Default)]
pub struct Step {
    /// The loss of each microbatch, as the model gave it.
    pub losses: Vec<Tensor>,
    /// The outputs of each microbatch, a map by name; [`Microbatches::merge`] joins them.
    pub outputs: Vec<Value>,
    /// The gradients of all variables that the loss was computed from.
    pub grads: GradStore,
    total: Option<Tensor>,
}

impl Step {
    pub(crate) fn with_grads(grads: GradStore) -> Self {
        Self { grads, ..Self::default() }
    }

    /// The loss of the batch.
    ///
    /// # Errors
    /// [`Error::Pipe`] if the model has none.
    pub fn loss(&self) -> Result<&Tensor> {
        self.total.as_ref().ok_or_else(|| Error::Pipe("the model has no loss".into()))
    }

    pub(crate) fn add_loss(&mut self, loss: &Value, weight: f64) -> Result<()> {
        let loss = scalar(loss)?;
        let share = loss.affine(weight, 0.0)?;
        self.total = Some(match self.total.take() {
            Some(total) => (total + share)?,
            None => share,
        });
        self.losses.push(loss.clone());
        Ok(())
    }
}
