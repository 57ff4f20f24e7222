//! Sums gradients over several backward passes.
use super::grads::GradMark;
use crate::{Error, Result, add_grad, rows, sum_dtype};
use candle_core::backprop::GradStore;
use candle_core::{TensorId, Var};
use std::collections::{HashMap, HashSet};

/// Sums gradients of several backward passes on this rank, without communication, like PyTorch's `no_sync`.
///
/// It holds one gradient for each of its variables, whatever the number of passes. candle's backward pass also returns
/// gradients of constants, such as the batch; they are left out.
///
/// [`mean`](Self::mean) returns the gradients that one backward pass over all samples would have computed. Pass them to
/// [`DataParallel::reduce`](crate::DataParallel::reduce) like any other gradients. If ranks have different numbers of
/// samples, pass them to [`reduce_weighted`](crate::DataParallel::reduce_weighted) with [`weight`](Self::weight). A
/// variable without a gradient in a pass counts as zeros there. Sums and means of 16-bit gradients are f32; see
/// [`round_grads`](crate::round_grads) for optimizers that require 16 bits.
///
/// ```
/// use candle_core::{Device, Tensor, Var};
/// use candle_dist::GradAccumulator;
///
/// let weight = Var::new(1f32, &Device::Cpu)?;
/// let mut accumulator = GradAccumulator::new([&weight]);
/// for x in [1f64, 2., 6.] {
///     accumulator.add(&(weight.as_tensor() * x)?.backward()?)?;
/// }
/// let grads = accumulator.mean()?;
/// assert_eq!(grads.get(&weight).map(Tensor::to_scalar::<f32>).transpose()?, Some(3.0));
/// # Ok::<(), candle_dist::Error>(())
/// ```
#[derive(Debug)]
pub struct GradAccumulator {
    vars: HashSet<TensorId>,
    sums: GradStore,
    weight: f64,
    /// The mark of the first pass, for gradients that tables keep by rows.
    since: Option<u64>,
    /// The weights of passes whose gradients one of them returns together, by the mark of these passes.
    joined: HashMap<TensorId, f64>,
}

impl GradAccumulator {
    /// Creates one for the gradients of these variables. Gradients of all others are left out, except those
    /// without elements.
    ///
    /// A variable that is given twice counts once.
    pub fn new<'a>(vars: impl IntoIterator<Item = &'a Var>) -> Self {
        let vars = vars.into_iter().map(|var| var.id()).collect();
        Self { vars, sums: GradStore::default(), weight: 0.0, since: None, joined: HashMap::new() }
    }

    /// Adds the gradients of a mean loss with weight 1, if all passes have the same number of samples.
    pub fn add(&mut self, grads: &GradStore) -> Result<()> {
        self.add_weighted(grads, 1.0)
    }

    /// Adds the gradients of a mean loss over `weight` samples. Tables keep gradients by rows themselves, so add the gradients
    /// of a pass before the next pass runs.
    ///
    /// # Errors
    /// If the weight is not a finite number greater than 0, or passes whose gradients one of them returns together, such as
    /// those in `no_sync` of fully sharded units, have unlike weights.
    pub fn add_weighted(&mut self, grads: &GradStore, weight: f64) -> Result<()> {
        if !(weight.is_finite() && weight > 0.0) {
            let reason = format!("weight {weight}: must be a finite number greater than 0");
            return Err(Error::Invalid { op: "add_weighted", reason });
        }
        for &id in grads.get_ids().filter(|id| grads.get_id(**id).is_some_and(GradMark::is_of_passes)) {
            let other = *self.joined.entry(id).or_insert(weight);
            if other != weight {
                let reason = format!(
                    "weight {weight} for a pass that returns gradients together with one of weight {other}, as in no_sync; use \
                     add, and scale the loss of each pass by its share of the rows"
                );
                return Err(Error::Invalid { op: "add_weighted", reason });
            }
        }
        for &id in grads.get_ids() {
            let Some(grad) = grads.get_id(id) else { continue };
            if GradMark::is_mark(grad) {
                self.sums.insert_id(id, grad.clone());
                continue;
            }
            // Lists of variables leave out empty shards, whose gradients cost nothing. Ranks must have the same ones. The handles of
            // tables say which gradients by rows the passes have added to.
            let is_small = grad.elem_count() == 0 || rows::shape_of_handle(id).is_some();
            if !self.vars.contains(&id) && !is_small {
                continue;
            }
            let grad = grad.detach().to_dtype(sum_dtype(grad.dtype()))?;
            let grad = if weight == 1.0 { grad } else { grad.affine(weight, 0.0)? };
            let sum = add_grad(self.sums.get_id(id), &grad)?;
            self.sums.insert_id(id, sum);
        }
        // Tables sum their gradients themselves. What they add from here on is of the next pass.
        let mark = rows::mark();
        if weight != 1.0 {
            rows::scale(grads, mark, weight)?;
        }
        self.since.get_or_insert(mark);
        rows::next_mark();
        self.weight += weight;
        Ok(())
    }

    /// Returns the sum of the weights; without weights, the number of passes.
    pub fn weight(&self) -> f64 {
        self.weight
    }

    /// Returns the sum of the gradients divided by the sum of the weights.
    pub fn mean(self) -> Result<GradStore> {
        let Self { vars, sums: mut grads, weight, since, .. } = self;
        if weight == 1.0 {
            return Ok(grads);
        }
        rows::scale(&grads, since.unwrap_or_default(), 1.0 / weight)?;
        for id in vars {
            if let Some(sum) = grads.get_id(id) {
                let mean = sum.affine(1.0 / weight, 0.0)?;
                grads.insert_id(id, mean);
            }
        }
        Ok(grads)
    }
}
