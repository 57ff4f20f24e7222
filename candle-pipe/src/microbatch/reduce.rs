//! Reductions of many values to one, for joining chunks.
use crate::graph::LossReduction;
use crate::{Error, Result, Value, ValuePath};
use std::fmt;
use std::sync::Arc;

/// Combines the value so far with that of the next chunk.
type Fold = dyn Fn(Value, &Value) -> Result<Value> + Send + Sync;

/// Folds the results of the chunks, in order, from an initial value.
///
/// ```
/// use candle_pipe::Value;
/// use candle_pipe::microbatch::{ChunkSpec, CustomReducer, merge_chunks};
///
/// let largest = CustomReducer::new(i64::MIN, |a, b| Ok(a.int()?.max(b.int()?).into()));
/// let chunks = [4, 7, 5].map(Value::from);
/// assert_eq!(merge_chunks(&chunks, Some(&largest.into()))?.int()?, 7);
/// # Ok::<(), candle_pipe::Error>(())
/// ```
#[derive(Clone)]
pub struct CustomReducer {
    init: Value,
    fold: Arc<Fold>,
}

impl CustomReducer {
    /// Creates a reducer that starts from `init` and computes `fold(value so far, value of the chunk)` for each chunk.
    ///
    /// The chunk's value is the one at the spec's position, which may be a container.
    pub fn new(
        init: impl Into<Value>,
        fold: impl Fn(Value, &Value) -> Result<Value> + Send + Sync + 'static,
    ) -> Self {
        Self { init: init.into(), fold: Arc::new(fold) }
    }

    pub(super) fn reduce(&self, chunks: &[&Value]) -> Result<Value> {
        chunks.iter().try_fold(self.init.clone(), |so_far, chunk| (self.fold)(so_far, chunk))
    }
}

/// Computes the batch's loss from the losses of its chunks, and marks which output is the loss.
///
/// ```
/// use candle_pipe::Value;
/// use candle_pipe::microbatch::{LossReducer, merge_chunks};
///
/// let losses = [0.5, 0.25].map(Value::from);
/// assert_eq!(merge_chunks(&losses, Some(&LossReducer::sum_reducer().into()))?.float()?, 0.75);
/// # Ok::<(), candle_pipe::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LossReducer(ReducerKind);

#[derive(Debug, Clone)]
enum ReducerKind {
    Sum,
    Mean,
    Custom(CustomReducer),
}

impl LossReducer {
    /// For losses that are sums: adds them. Tensors of one element, or floats.
    pub const fn sum_reducer() -> Self {
        Self(ReducerKind::Sum)
    }

    /// For losses that are means over rows: weights them by the chunks' rows, so that the mean is over all rows of the
    /// batch, also for uneven chunks. Tensors of one element, or floats.
    ///
    /// [`Microbatches::merge`](super::Microbatches::merge) knows the rows; [`merge_chunks`](super::merge_chunks)
    /// refuses this reducer.
    pub const fn mean_reducer() -> Self {
        Self(ReducerKind::Mean)
    }

    /// For other losses: uses a [`CustomReducer`].
    pub const fn custom(reducer: CustomReducer) -> Self {
        Self(ReducerKind::Custom(reducer))
    }

    /// Returns the reduction by which a pipe differentiates such losses; `None` for custom reducers.
    pub(crate) const fn reduction(&self) -> Option<LossReduction> {
        match self.0 {
            ReducerKind::Sum => Some(LossReduction::Sum),
            ReducerKind::Mean => Some(LossReduction::Mean),
            ReducerKind::Custom(_) => None,
        }
    }

    /// Reduces several losses to one; `weights` are the chunks' shares of the rows, if known.
    pub(super) fn reduce(
        &self,
        path: &ValuePath,
        chunks: &[&Value],
        weights: Option<&[f64]>,
    ) -> Result<Value> {
        let weights = match (&self.0, weights) {
            (ReducerKind::Custom(reducer), _) => return reducer.reduce(chunks),
            (ReducerKind::Sum, _) => None,
            (ReducerKind::Mean, Some(weights)) => Some(weights),
            (ReducerKind::Mean, None) => {
                return Err(Error::Microbatches(format!(
                    "{path}: a mean of losses is weighted by the chunks' rows, which are not known here; join with \
                     Microbatches::merge, and not in masked mode, where losses are of more rows than the chunk's"
                )));
            }
        };
        check_losses(path, chunks)?;
        let weighted = chunks.iter().enumerate().map(|(chunk, loss)| match weights {
            Some(weights) => times(loss, weights[chunk]),
            None => Ok((*loss).clone()),
        });
        let sum = weighted.reduce(|sum, loss| plus(&sum?, &loss?));
        sum.unwrap_or(Ok(Value::None))
    }
}

/// Checks that losses are floating-point numbers of one form.
fn check_losses(path: &ValuePath, chunks: &[&Value]) -> Result<()> {
    for (chunk, loss) in chunks.iter().enumerate() {
        let fault = match (loss, chunks[0]) {
            (Value::Tensor(t), _) if t.elem_count() != 1 => {
                "which is not one number; TensorChunkSpec(0) joins rows"
            }
            (Value::Tensor(t), _) if !t.dtype().is_float() => "which is not floating",
            (Value::Tensor(t), Value::Tensor(first))
                if t.dtype() == first.dtype() && t.dims() == first.dims() =>
            {
                continue;
            }
            (Value::Float(_), Value::Float(_)) => continue,
            (Value::Tensor(_) | Value::Float(_), _) => "unlike chunk 0's",
            _ => "which is neither a tensor nor a float",
        };
        return Err(Error::Microbatches(format!("{path}: the loss of chunk {chunk} is {loss}, {fault}")));
    }
    Ok(())
}

fn times(loss: &Value, weight: f64) -> Result<Value> {
    Ok(match loss {
        Value::Tensor(loss) => loss.affine(weight, 0.0)?.into(),
        loss => (loss.float()? * weight).into(),
    })
}

fn plus(sum: &Value, loss: &Value) -> Result<Value> {
    Ok(match sum {
        Value::Tensor(sum) => (sum + loss.tensor()?)?.into(),
        sum => (sum.float()? + loss.float()?).into(),
    })
}

impl fmt::Debug for CustomReducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CustomReducer").field("init", &self.init).finish_non_exhaustive()
    }
}

impl fmt::Display for LossReducer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self.0 {
            ReducerKind::Sum => "LossReducer(sum)",
            ReducerKind::Mean => "LossReducer(mean)",
            ReducerKind::Custom(_) => "LossReducer(custom)",
        })
    }
}
