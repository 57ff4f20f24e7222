//! What a message says about its values: everything except the elements of their tensors.
use crate::{Error, Result, Value};
use candle_core::{DType, Tensor};
use candle_dist::DeviceMesh;
#[cfg(feature = "shard")]
use candle_shard::{DTensor, Replicate, SpecDescription};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A value without the elements of its tensors.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) enum Outline {
    Tensor(TensorOutline),
    /// A shard, the layout of the whole, and the axes where its gradient is a partial sum.
    #[cfg(feature = "shard")]
    DTensor(TensorOutline, SpecDescription, Vec<usize>),
    Int(i64),
    /// The bits, because JSON would not preserve every float.
    Float(u64),
    Bool(bool),
    Text(String),
    None,
    List(Vec<Outline>),
    Tuple(Vec<Outline>),
    Map(BTreeMap<String, Outline>),
}

/// A tensor without its elements.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(super) struct TensorOutline {
    pub(super) dims: Vec<usize>,
    dtype: String,
    /// Whether it has a gradient.
    pub(super) tracked: bool,
}

impl TensorOutline {
    fn of(tensor: &Tensor, tracked: bool) -> Self {
        Self { dims: tensor.dims().to_vec(), dtype: tensor.dtype().as_str().into(), tracked }
    }

    pub(super) fn dtype(&self) -> Result<DType> {
        self.dtype.parse().map_err(|_| Error::Pipe(format!("a message with {} tensors", self.dtype)))
    }
}

impl Outline {
    /// Returns the outline of a value; `take` gets its tensors in order, and returns whether each is tracked.
    pub(super) fn of(value: &Value, take: &mut dyn FnMut(&Tensor) -> bool) -> Self {
        let mut all = |values: &[Value]| values.iter().map(|value| Self::of(value, take)).collect();
        match value {
            Value::List(values) => Self::List(all(values)),
            Value::Tuple(values) => Self::Tuple(all(values)),
            Value::Map(values) => {
                Self::Map(values.iter().map(|(key, value)| (key.clone(), Self::of(value, take))).collect())
            }
            Value::Tensor(tensor) => Self::Tensor(TensorOutline::of(tensor, take(tensor))),
            #[cfg(feature = "shard")]
            Value::DTensor(tensor) => {
                let varies =
                    |&axis: &usize| tensor.placements()[axis] == Replicate && tensor.is_varying(axis);
                let varying = (0..tensor.placements().len()).filter(varies).collect();
                let local = tensor.to_local();
                Self::DTensor(TensorOutline::of(local, take(local)), tensor.spec().into(), varying)
            }
            Value::Int(number) => Self::Int(*number),
            Value::Float(number) => Self::Float(number.to_bits()),
            Value::Bool(truth) => Self::Bool(*truth),
            Value::Text(text) => Self::Text(text.clone()),
            Value::None => Self::None,
        }
    }

    /// Restores the value; `next` returns its tensors in order, and shards become sharded tensors on `mesh`.
    #[cfg_attr(not(feature = "shard"), expect(clippy::only_used_in_recursion))]
    pub(super) fn value(
        &self,
        mesh: Option<&DeviceMesh>,
        next: &mut dyn FnMut(&TensorOutline) -> Result<Tensor>,
    ) -> Result<Value> {
        let mut all = |outlines: &[Self]| {
            outlines.iter().map(|outline| outline.value(mesh, next)).collect::<Result<_>>()
        };
        Ok(match self {
            Self::List(outlines) => Value::List(all(outlines)?),
            Self::Tuple(outlines) => Value::Tuple(all(outlines)?),
            Self::Map(outlines) => {
                let value = |(key, outline): (&String, &Self)| Ok((key.clone(), outline.value(mesh, next)?));
                Value::Map(outlines.iter().map(value).collect::<Result<_>>()?)
            }
            Self::Tensor(tensor) => Value::Tensor(next(tensor)?),
            #[cfg(feature = "shard")]
            Self::DTensor(tensor, layout, varying) => {
                let no_mesh = || {
                    let reason = "came to a stage whose scope has no mesh; gather it, or build all stages from a MeshVarBuilder";
                    Error::Pipe(format!("a sharded tensor {reason}"))
                };
                let spec = layout.on(mesh.ok_or_else(no_mesh)?)?;
                let tensor = DTensor::from_local_with_spec(next(tensor)?, spec)?;
                let tensor = varying.iter().try_fold(tensor, |tensor, &axis| tensor.varying_on(axis))?;
                Value::DTensor(tensor)
            }
            Self::Int(number) => Value::Int(*number),
            Self::Float(bits) => Value::Float(f64::from_bits(*bits)),
            Self::Bool(truth) => Value::Bool(*truth),
            Self::Text(text) => Value::Text(text.clone()),
            Self::None => Value::None,
        })
    }
}
