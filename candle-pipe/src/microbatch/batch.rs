//! A batch cut into microbatches.
use super::merge::Merge;
use super::{ChunkSpec, Splitter};
use crate::cuts::CutDims;
use crate::{Error, Kwargs, Result, Value};
use std::collections::BTreeMap;
use std::ops::Range;

/// The arguments of every microbatch of a batch, and the number of rows of each.
#[derive(Debug, Clone)]
pub struct Microbatches {
    /// The positional arguments of each chunk.
    pub args: Vec<Vec<Value>>,
    /// The arguments by name of each chunk.
    pub kwargs: Vec<Kwargs>,
    rows: Vec<usize>,
    masked: bool,
    /// The dims along which the tensors of each argument are cut.
    pub(super) args_dims: Vec<CutDims>,
    pub(super) kwargs_dims: BTreeMap<String, CutDims>,
}

impl Microbatches {
    /// Cuts inputs that are passed by position into at most `chunks` microbatches, each tensor along dim 0.
    ///
    /// [`split_args_kwargs_into_chunks`](super::split_args_kwargs_into_chunks) also takes inputs by name and other dims.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_pipe::microbatch::Microbatches;
    ///
    /// let (x, y) = (Tensor::zeros((19, 2), DType::F32, &Device::Cpu)?, Tensor::zeros(19, DType::U32, &Device::Cpu)?);
    /// let batch = Microbatches::cut(8, [&x, &y])?;
    /// assert_eq!(batch.rows(), [3, 3, 3, 2, 2, 2, 2, 2]);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`split_args_kwargs_into_chunks`](super::split_args_kwargs_into_chunks).
    pub fn cut<V: Into<Value>>(chunks: usize, inputs: impl IntoIterator<Item = V>) -> Result<Self> {
        let inputs: Vec<Value> = inputs.into_iter().map(Into::into).collect();
        Splitter::new(chunks).split(&inputs, &Kwargs::new(), None, None)
    }

    /// Takes inputs that are cut already: those of each microbatch that are passed by position, of any
    /// shapes. Each microbatch counts as one row, so there may be fewer of them than a schedule has.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_pipe::microbatch::Microbatches;
    ///
    /// let text = |tokens: usize| Tensor::zeros((1, tokens), DType::U32, &Device::Cpu);
    /// let batch = Microbatches::of_rows(vec![vec![text(3)?.into()], vec![text(5)?.into()]])?;
    /// assert_eq!(batch.rows(), [1, 1]);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Microbatches`] if there are none.
    pub fn of_rows(args: Vec<Vec<Value>>) -> Result<Self> {
        if args.is_empty() {
            return Err(Error::Microbatches("no microbatches; give one at least".into()));
        }
        let (rows, kwargs) = (vec![1; args.len()], vec![Kwargs::new(); args.len()]);
        Ok(Self { args, kwargs, ..Self::new(rows, false) })
    }

    pub(super) fn new(rows: Vec<usize>, masked: bool) -> Self {
        let (args, kwargs, args_dims, kwargs_dims) = Default::default();
        Self { args, kwargs, rows, masked, args_dims, kwargs_dims }
    }

    /// Returns the number of chunks, which is smaller than requested if the batch has fewer rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns false: a batch has at least one chunk.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns whether each chunk has the shape of the whole batch, with zeros in the other chunks' rows.
    pub fn is_masked(&self) -> bool {
        self.masked
    }

    /// Returns the arguments of each chunk in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = (&[Value], &Kwargs)> {
        self.args.iter().map(Vec::as_slice).zip(&self.kwargs)
    }

    /// Returns the number of rows of each chunk; in masked mode those that are not zeroed; 1 if no tensor was cut.
    pub fn rows(&self) -> &[usize] {
        &self.rows
    }

    /// Returns the rows of each chunk in a larger batch, in which this one begins with row `first`.
    pub(crate) fn row_ranges(&self, first: usize) -> Vec<Range<usize>> {
        let (mut end, all) = (first, first..first + self.rows.iter().sum::<usize>());
        let range = |rows: &usize| {
            end += rows;
            if self.masked { all.clone() } else { end - rows..end }
        };
        self.rows.iter().map(range).collect()
    }

    /// Returns the dims along which the tensors of each argument are cut.
    pub(crate) fn dims(&self) -> (&[CutDims], &BTreeMap<String, CutDims>) {
        (&self.args_dims, &self.kwargs_dims)
    }

    /// Returns the share of each chunk in the rows of the batch: the weight of its mean in the mean over all rows. The
    /// shares sum to 1.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_pipe::microbatch::Microbatches;
    ///
    /// let x = Tensor::arange(0f32, 5., &Device::Cpu)?;
    /// let batch = Microbatches::cut(2, [x])?;
    /// assert_eq!(batch.weights(), [0.6, 0.4]);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    pub fn weights(&self) -> Vec<f64> {
        let total = self.rows.iter().sum::<usize>() as f64;
        self.rows.iter().map(|&rows| rows as f64 / total).collect()
    }

    /// Joins one output per chunk like [`merge_chunks`](super::merge_chunks), with the known rows of the chunks.
    ///
    /// So means of losses are weighted, and masked chunks contribute only their own rows. In masked mode an output may
    /// have several entries per row of the batch, such as one per token.
    ///
    /// # Errors
    /// [`Error::Microbatches`] as in [`merge_chunks`](super::merge_chunks); if there is not one output per chunk; in
    /// masked mode, for outputs whose entries do not belong to rows, and for means of losses, which would count rows of
    /// zeros.
    pub fn merge(&self, outputs: &[Value], spec: Option<&ChunkSpec>) -> Result<Value> {
        if outputs.len() != self.len() {
            let (given, chunks) = (outputs.len(), self.len());
            return Err(Error::Microbatches(format!(
                "{given} outputs for {chunks} chunks; give one for each"
            )));
        }
        let weights = self.weights();
        let merge = match self.masked {
            true => Merge { weights: None, masked: Some(&self.rows) },
            false => Merge { weights: Some(&weights), masked: None },
        };
        merge.all(outputs, spec)
    }
}
