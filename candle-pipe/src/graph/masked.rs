//! The rows of a masked microbatch, for the node that makes its loss.
use super::{Graph, ValueId};
use crate::cuts::Dims;
use crate::{Error, Path, Result, Value};
use candle_core::Tensor;
use candle_dist::TensorTree;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// Which rows of a batch a [masked](crate::microbatch::Splitter::masked) microbatch has, and which values hold rows.
#[derive(Debug, Clone)]
pub struct Masked {
    rows: Range<usize>,
    /// The place of the batch's first row in a larger batch.
    first: usize,
    /// The number of rows of the batch.
    total: usize,
    values: Arc<Values>,
}

/// What is cut, and what follows from it.
#[derive(Debug)]
struct Values {
    /// The dims along which the tensors of the model's inputs are cut.
    inputs: BTreeMap<ValueId, Dims>,
    /// The values that nodes make of what is cut.
    made: Vec<ValueId>,
}

impl Masked {
    /// One for each microbatch of a batch, with so many rows; `inputs` has the dims along which inputs are cut.
    pub(crate) fn of_rows(rows: &[usize], first: usize, inputs: BTreeMap<ValueId, Dims>, graph: &Graph) -> Vec<Self> {
        let cut = inputs.iter().filter(|(_, dims)| dims.iter().any(Option::is_some)).map(|(&value, _)| value);
        let made = graph.made_of(cut);
        let (values, total) = (Arc::new(Values { inputs, made }), rows.iter().sum());
        let starts = rows.iter().scan(0, |start, rows| Some(std::mem::replace(start, *start + rows)));
        let rows = starts.zip(rows).map(|(start, rows)| start..start + rows);
        rows.map(|rows| Self { rows, first, total, values: values.clone() }).collect()
    }

    /// Whether a tensor of this input is cut, as far as this rank was given the input.
    pub(crate) fn cuts(&self, input: ValueId) -> bool {
        self.values.inputs.get(&input).is_some_and(|dims| dims.iter().any(Option::is_some))
    }

    /// The same where `cut` are all inputs that are cut, also those that this rank was not given.
    pub(crate) fn with_cut(self, cut: &[ValueId], graph: &Graph) -> Self {
        let made = graph.made_of(cut.iter().copied());
        Self { values: Arc::new(Values { inputs: self.values.inputs.clone(), made }), ..self }
    }

    /// The microbatch's own rows, in the larger batch.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.first + self.rows.start..self.first + self.rows.end
    }

    /// The microbatch's own rows of a value.
    pub(crate) fn own(&self, id: ValueId, value: &Value) -> Result<Value> {
        if let Some(dims) = self.values.inputs.get(&id) {
            let mut dims = dims.iter().copied();
            return value.map_tensors(|tensor| match dims.next().flatten() {
                Some(dim) => self.narrow(tensor, dim),
                None => Ok(tensor.clone()),
            });
        }
        match self.values.made.contains(&id) {
            true => value.map_leaves(&Path::new("loss"), &mut |_, leaf| match leaf {
                Value::Tensor(tensor) => Ok(self.narrow(tensor, 0)?.into()),
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

    /// Where the microbatch's own rows begin along a dim, and how many places they have.
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
