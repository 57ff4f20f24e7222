//! The rows of a masked microbatch, for the node that computes its loss.
use super::{Graph, ValueId};
use crate::cuts::CutDims;
use crate::{Error, Result, Value, ValuePath};
use candle_core::Tensor;
use candle_dist::TensorTree;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The rows of a batch that a [masked](crate::microbatch::Splitter::masked) microbatch has, and the values that hold
/// rows.
#[derive(Debug, Clone)]
pub struct MaskedRows {
    rows: Range<usize>,
    /// The index of the batch's first row in a larger batch.
    first: usize,
    /// The number of rows of the batch.
    total: usize,
    values: Arc<MaskedValues>,
}

/// The former name of [`MaskedRows`].
#[deprecated(since = "0.1.0", note = "renamed to MaskedRows")]
pub type Masked = MaskedRows;

/// The values that are cut, and those that depend on them.
#[derive(Debug)]
struct MaskedValues {
    /// The dims along which the tensors of the model's inputs are cut.
    inputs: BTreeMap<ValueId, CutDims>,
    /// The values that depend on cut inputs.
    made: Vec<ValueId>,
}

impl MaskedRows {
    /// Creates one for each microbatch of a batch, with `rows` rows each. `inputs` has the dims along which inputs are
    /// cut.
    pub(crate) fn of_rows(
        rows: &[usize],
        first: usize,
        inputs: BTreeMap<ValueId, CutDims>,
        graph: &Graph,
    ) -> Vec<Self> {
        let cut = inputs.iter().filter(|(_, dims)| dims.iter().any(Option::is_some)).map(|(&value, _)| value);
        let made = graph.made_of(cut);
        let (values, total) = (Arc::new(MaskedValues { inputs, made }), rows.iter().sum());
        let starts = rows.iter().scan(0, |start, rows| Some(std::mem::replace(start, *start + rows)));
        let rows = starts.zip(rows).map(|(start, rows)| start..start + rows);
        rows.map(|rows| Self { rows, first, total, values: values.clone() }).collect()
    }

    /// Returns whether a tensor of this input is cut, if this rank has the input.
    pub(crate) fn cuts(&self, input: ValueId) -> bool {
        self.values.inputs.get(&input).is_some_and(|dims| dims.iter().any(Option::is_some))
    }

    /// Replaces the set of cut inputs by `cut`, which includes inputs that this rank does not have.
    pub(crate) fn with_cut(self, cut: &[ValueId], graph: &Graph) -> Self {
        let made = graph.made_of(cut.iter().copied());
        Self { values: Arc::new(MaskedValues { inputs: self.values.inputs.clone(), made }), ..self }
    }

    /// Returns the range of the microbatch's own rows in the larger batch.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.first + self.rows.start..self.first + self.rows.end
    }

    /// Returns the microbatch's own rows of a value.
    pub(crate) fn own(&self, id: ValueId, value: &Value) -> Result<Value> {
        if let Some(dims) = self.values.inputs.get(&id) {
            let mut dims = dims.iter().copied();
            return value.map_tensors(|tensor| match dims.next().flatten() {
                Some(dim) => self.narrow(tensor, dim),
                None => Ok(tensor.clone()),
            });
        }
        match self.values.made.contains(&id) {
            true => value.map_leaves(&ValuePath::new("loss"), &mut |_, leaf| match leaf {
                Value::Tensor(tensor) => Ok(self.narrow(tensor, 0)?.into()),
                #[cfg(feature = "shard")]
                Value::DTensor(tensor) => {
                    let (start, rows) = self.places(leaf, tensor.dims(), 0)?;
                    Ok(tensor.narrow(0, start, rows)?.into())
                }
                plain => Ok(plain.clone()),
            }),
            false => Ok(value.clone()),
        }
    }

    fn narrow(&self, tensor: &Tensor, dim: usize) -> Result<Tensor> {
        let (start, rows) = self.places(&tensor.into(), tensor.dims(), dim)?;
        Ok(tensor.narrow(dim, start, rows)?)
    }

    /// Returns start and length of the microbatch's own rows along a dim.
    fn places(&self, value: &Value, dims: &[usize], dim: usize) -> Result<(usize, usize)> {
        let places = dims.get(dim).copied().unwrap_or(0);
        if places == 0 || places % self.total != 0 {
            let total = self.total;
            return Err(Error::Microbatches(format!(
                "the loss of a masked microbatch takes {value}, whose dim {dim} has no whole number of places for each of the \
                 {total} rows of the batch, so that the microbatch's own are not known; do not mask, or give the loss values \
                 with rows"
            )));
        }
        let each = places / self.total;
        Ok((self.rows.start * each, self.rows.len() * each))
    }
}
