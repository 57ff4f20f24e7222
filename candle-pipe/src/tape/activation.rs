//! The data sent between stages: values forward, gradients backward.
use crate::graph::LossReduction;
use crate::{Error, Result, Value};
use candle_core::Tensor;
use candle_dist::TensorTree;

/// A value sent between stages: without a graph, and with flags for the tensors that require a gradient.
#[derive(Debug, Clone)]
pub struct Activation {
    /// The value.
    pub value: Value,
    /// For each tensor of the value, in the tree's order, whether it has a gradient.
    pub tracked: Vec<bool>,
}

impl Activation {
    /// Creates an activation none of whose tensors requires a gradient, such as an output of an evaluation.
    pub fn constant(value: Value) -> Result<Self> {
        let mut activation = Self::of(&value)?;
        activation.tracked.fill(false);
        Ok(activation)
    }

    /// Creates an activation whose tensors require a gradient if they are variables or computed from variables.
    pub fn of(value: &Value) -> Result<Self> {
        let tracked =
            value.tensors().into_iter().map(|tensor| tensor.dtype().is_float() && tensor.track_op());
        Ok(Self { tracked: tracked.collect(), value: detached(value)? })
    }
}

/// Detaches all tensors of a value.
pub(crate) fn detached(value: &Value) -> Result<Value> {
    value.map_tensors(|tensor| -> Result<Tensor> { Ok(tensor.detach()) })
}

/// The gradient of a value: for each of its tensors, in the tree's order, a tensor of the same shape, or none.
#[derive(Debug, Clone, Default)]
pub struct Gradient(pub Vec<Option<Tensor>>);

impl Gradient {
    /// Returns whether there is no gradient at all, for example if no later stage contributes to the loss.
    pub fn is_none(&self) -> bool {
        self.0.iter().all(Option::is_none)
    }

    /// Sums the gradients from all users of a value, in their order; missing ones add nothing.
    ///
    /// # Errors
    /// If they do not belong to one value.
    pub fn sum<'a>(contributions: impl IntoIterator<Item = &'a Self>) -> Result<Self> {
        let mut sum = Self::default();
        for contribution in contributions {
            if sum.0.len() < contribution.0.len() {
                sum.0.resize(contribution.0.len(), None);
            }
            for (sum, part) in sum.0.iter_mut().zip(&contribution.0) {
                *sum = match (sum.take(), part) {
                    (Some(sum), Some(part)) => Some((sum + part)?),
                    (sum, part) => sum.or_else(|| part.clone()),
                };
            }
        }
        Ok(sum)
    }

    /// Returns the gradient `weight` of a loss, or of the sum in a loss that is a tuple of a sum and a count.
    ///
    /// # Errors
    /// [`Error::Pipe`] if the loss is not a scalar of floats.
    pub fn of_loss(loss: &Value, weight: f64) -> Result<Self> {
        let sum = match loss {
            Value::Tuple(parts) if parts.len() == 2 => &parts[0],
            other => other,
        };
        Ok(Self(vec![Some(scalar(sum)?.ones_like()?.affine(weight, 0.0)?)]))
    }
}

/// Returns the tensor of a loss.
pub(crate) fn scalar(loss: &Value) -> Result<&Tensor> {
    match loss {
        Value::Tensor(tensor) if tensor.rank() == 0 && tensor.dtype().is_float() => Ok(tensor),
        other => Err(Error::Pipe(format!(
            "the loss is {other}: expected a scalar of floats; reduce it in a function"
        ))),
    }
}

/// Returns the tensor of a loss, and its count if it has one.
pub(crate) fn parts(loss: &Value, reduction: LossReduction) -> Result<(&Tensor, Option<&Value>)> {
    if reduction != LossReduction::Counted {
        return Ok((scalar(loss)?, None));
    }
    let wrong = || {
        let want = "expected a tuple of a sum, a scalar of floats, and a count, a number or a tensor of one";
        Error::Pipe(format!("the loss is {loss}: {want}"))
    };
    let Value::Tuple(parts) = loss else { return Err(wrong()) };
    match parts.as_slice() {
        [sum, count @ (Value::Int(_) | Value::Float(_))] => {
            Ok((scalar(sum).map_err(|_| wrong())?, Some(count)))
        }
        [sum, count @ Value::Tensor(one)] if one.elem_count() == 1 => {
            Ok((scalar(sum).map_err(|_| wrong())?, Some(count)))
        }
        _ => Err(wrong()),
    }
}
