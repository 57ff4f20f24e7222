//! A batch that was cut.
use super::ChunkSpec;
use super::merge::Merge;
use crate::cuts::Dims;
use crate::{Error, Kwargs, Result, Value};
use std::collections::BTreeMap;
use std::ops::Range;

/// The arguments of every microbatch of a batch, and how many rows each has.
#[derive(Debug, Clone)]
pub struct Microbatches {
    /// The positional arguments of each chunk.
    pub args: Vec<Vec<Value>>,
    /// The arguments by name of each chunk.
    pub kwargs: Vec<Kwargs>,
    rows: Vec<usize>,
    masked: bool,
    /// The dims that the tensors of each argument are cut along.
    pub(super) args_dims: Vec<Dims>,
    pub(super) kwargs_dims: BTreeMap<String, Dims>,
}

impl Microbatches {
    pub(super) fn new(rows: Vec<usize>, masked: bool) -> Self {
        let (args, kwargs, args_dims, kwargs_dims) = Default::default();
        Self { args, kwargs, rows, masked, args_dims, kwargs_dims }
    }

    /// How many chunks there are: fewer than were asked for, if the batch has fewer rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Never: a batch is at least one chunk.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Whether each chunk is of the whole batch's shape, with zeros in the others' rows.
    pub fn is_masked(&self) -> bool {
        self.masked
    }

    /// The arguments of one chunk after the other.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&[Value], &Kwargs)> {
        self.args.iter().map(Vec::as_slice).zip(&self.kwargs)
    }

    /// The rows of each chunk, in masked mode those that are not zeroed; one each if no tensor was cut.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// The rows that the tensors of each chunk have in a batch of which this one begins with row `first`.
    pub(crate) fn row_ranges(&self, first: usize) -> Vec<Range<usize>> {
        let (mut end, all) = (first, first..first + self.rows.iter().sum::<usize>());
        let range = |rows: &usize| {
            end += rows;
            if self.masked { all.clone() } else { end - rows..end }
        };
        self.rows.iter().map(range).collect()
    }

    /// The dims that the tensors of each argument are cut along.
    pub(crate) fn dims(&self) -> (&[Dims], &BTreeMap<String, Dims>) {
        (&self.args_dims, &self.kwargs_dims)
    }

    /// The share that each chunk has in the rows of the batch: what a mean over the chunk's rows counts in that over
    /// all rows. They sum to 1.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_pipe::Kwargs;
    /// use candle_pipe::microbatch::split_args_kwargs_into_chunks;
    ///
    /// let x = Tensor::arange(0f32, 5., &Device::Cpu)?;
    /// let batch = split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), 2, None, None)?;
    /// assert_eq!(batch.weights(), [0.6, 0.4]);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn weights(&self) -> Vec<f64> {
        let total = self.rows.iter().sum::<usize>() as f64;
        self.rows.iter().map(|&rows| rows as f64 / total).collect()
    }

    /// Joins one output a chunk as [`merge_chunks`](super::merge_chunks) does, knowing the chunks' rows.
    ///
    /// So means of losses get their weights, and masked chunks give only their own rows; there, an output may have a
    /// whole number of places for each row of the batch, such as one for each token.
    ///
    /// # Errors
    /// [`Error::Microbatches`] as of [`merge_chunks`](super::merge_chunks); if there is not one output a chunk; and in
    /// masked mode, for outputs whose places do not belong to rows, and for means of losses, which would count rows of
    /// zeros.
    pub fn merge(&self, outputs: &[Value], spec: Option<&ChunkSpec>) -> Result<Value> {
        if outputs.len() != self.len() {
            let (given, chunks) = (outputs.len(), self.len());
            return Err(Error::Microbatches(format!("{given} outputs for {chunks} chunks; give one for each")));
        }
        let weights = self.weights();
        let merge = match self.masked {
            true => Merge { weights: None, masked: Some(&self.rows) },
            false => Merge { weights: Some(&weights), masked: None },
        };
        merge.all(outputs, spec)
    }
}
