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
    Tensor(Vec<usize>, String),
    /// A shard, the layout of the whole, and the axes where its gradient is a partial sum.
    #[cfg(feature = "shard")]
    DTensor(Vec<usize>, SpecDescription, Vec<usize>),
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

impl Outline {
    /// Returns the outline of a value; appends its tensors to `tensors`.
    pub(super) fn of(value: &Value, tensors: &mut Vec<Tensor>) -> Self {
        let mut all = |values: &[Value]| values.iter().map(|value| Self::of(value, tensors)).collect();
        match value {
            Value::List(values) => Self::List(all(values)),
            Value::Tuple(values) => Self::Tuple(all(values)),
            Value::Map(values) => {
                Self::Map(values.iter().map(|(key, value)| (key.clone(), Self::of(value, tensors))).collect())
            }
            Value::Tensor(tensor) => {
                tensors.push(tensor.clone());
                Self::Tensor(tensor.dims().to_vec(), tensor.dtype().as_str().into())
            }
            #[cfg(feature = "shard")]
            Value::DTensor(tensor) => {
                tensors.push(tensor.to_local().clone());
                let varies = |&axis: &usize| tensor.placements()[axis] == Replicate && tensor.is_varying(axis);
                let varying = (0..tensor.placements().len()).filter(varies).collect();
                Self::DTensor(tensor.to_local().dims().to_vec(), tensor.spec().into(), varying)
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
        next: &mut dyn FnMut(&[usize], DType) -> Result<Tensor>,
    ) -> Result<Value> {
        let mut all =
            |outlines: &[Self]| outlines.iter().map(|outline| outline.value(mesh, next)).collect::<Result<_>>();
        Ok(match self {
            Self::List(outlines) => Value::List(all(outlines)?),
            Self::Tuple(outlines) => Value::Tuple(all(outlines)?),
            Self::Map(outlines) => {
                let value = |(key, outline): (&String, &Self)| Ok((key.clone(), outline.value(mesh, next)?));
                Value::Map(outlines.iter().map(value).collect::<Result<_>>()?)
            }
            Self::Tensor(dims, dtype) => {
                let dtype = dtype.parse().map_err(|_| Error::Pipe(format!("a message with {dtype} tensors")))?;
                Value::Tensor(next(dims, dtype)?)
            }
            #[cfg(feature = "shard")]
            Self::DTensor(dims, layout, varying) => {
                let no_mesh = || {
                    let reason = "came to a stage whose scope has no mesh; gather it, or build all stages from a ShardedVarBuilder";
                    Error::Pipe(format!("a sharded tensor {reason}"))
                };
                let spec = layout.on(mesh.ok_or_else(no_mesh)?)?;
                let tensor = DTensor::from_local_with_spec(next(dims, spec.dtype())?, spec)?;
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
