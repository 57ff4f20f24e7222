//! Cuts arguments into microbatches.
use super::cut::InputCuts;
use super::{ChunkSpec, KwargsSpec, Microbatches, microbatch_sizes};
use crate::{Error, Kwargs, Result, Value};
use candle_core::Tensor;
use candle_dist::TensorTree;

/// Cuts arguments into at most `chunks` microbatches, each tensor along its spec's dim.
///
/// Without specs, tensors are cut along [`DEFAULT_CHUNK_DIM`](super::DEFAULT_CHUNK_DIM) and plain values go to every
/// chunk. Specs of kwargs belong to them by name. If the batch has fewer rows than `chunks`, there are as many chunks
/// as rows, and a warning is logged. Sizes are those of [`microbatch_sizes`]; chunks are views, and their gradients
/// flow to the whole.
///
/// # Errors
/// [`Error::Microbatches`], naming paths like `args[1].mask`, if
/// - `chunks` is 0, or there would be more than 2²⁰, or a tensor that is cut has no rows,
/// - two tensors that are cut have different numbers of rows,
/// - a spec names a dim that a tensor does not have, or stands for a plain value,
/// - specs and values differ in structure.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_pipe::Kwargs;
/// use candle_pipe::microbatch::{TensorChunkSpec, split_args_kwargs_into_chunks};
/// use std::collections::BTreeMap;
///
/// let (x, mask) = (Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?, Tensor::zeros((4, 3), DType::U8, &Device::Cpu)?);
/// let kwargs = Kwargs::from([("mask".into(), mask.into())]);
/// let dims = TensorChunkSpec::from_dict(BTreeMap::from([("mask", -1)]))?;
/// let batch = split_args_kwargs_into_chunks(&[x.into()], &kwargs, 8, None, Some(&dims))?;
/// assert_eq!(batch.len(), 3); // as many as rows
/// assert_eq!(batch.kwargs[0]["mask"].to_string(), "u8[4, 1]");
/// # Ok::<(), candle_pipe::Error>(())
/// ```
pub fn split_args_kwargs_into_chunks(
    args: &[Value],
    kwargs: &Kwargs,
    chunks: usize,
    args_spec: Option<&[ChunkSpec]>,
    kwargs_spec: Option<&KwargsSpec>,
) -> Result<Microbatches> {
    Splitter::new(chunks).split(args, kwargs, args_spec, kwargs_spec)
}

/// The most chunks of a batch.
const MOST_CHUNKS: usize = 1 << 20;

/// How arguments are cut into microbatches.
#[derive(Debug, Clone, Copy)]
pub struct Splitter {
    chunks: usize,
    masked: bool,
    unequal: bool,
    rows: Option<usize>,
}

impl Splitter {
    /// Creates a splitter into at most `chunks` chunks, of tensors that all have the same number of rows.
    pub const fn new(chunks: usize) -> Self {
        Self { chunks, masked: false, unequal: false, rows: None }
    }

    /// Masks chunks, to compare with the batch bit by bit: each has the whole batch's shape, with zeros in other rows.
    ///
    /// Kernels may sum in another order for fewer rows, so the rows of a chunk need not be bit-equal to those of the
    /// batch. The rows of a masked chunk are, for a model that treats rows independently.
    /// [`Microbatches::merge`] uses each chunk's own rows. Chunks are copies.
    ///
    /// In a pipe the node that computes the loss gets only the chunk's own rows, so that losses and gradients are those
    /// of chunks that are not masked. Its inputs from other nodes have rows along dim 0, with a fixed number of entries
    /// per row.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_pipe::Kwargs;
    /// use candle_pipe::microbatch::Splitter;
    ///
    /// let x = Tensor::new(&[1f32, 2., 3.], &Device::Cpu)?;
    /// let batch = Splitter::new(2).masked().split(&[x.into()], &Kwargs::new(), None, None)?;
    /// assert_eq!(batch.args[1][0].tensor()?.to_vec1::<f32>()?, [0., 0., 3.]);
    ///
    /// let outputs = [batch.args[0][0].clone(), batch.args[1][0].clone()];
    /// assert_eq!(batch.merge(&outputs, None)?.tensor()?.to_vec1::<f32>()?, [1., 2., 3.]);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    #[must_use]
    pub const fn masked(self) -> Self {
        Self { masked: true, ..self }
    }

    /// Allows tensors with different numbers of rows, as PyTorch does: each is cut separately, into at most as many
    /// chunks as the smallest has rows.
    ///
    /// The chunks' [`rows`](Microbatches::rows) are then those of the first tensor that is cut.
    #[must_use]
    pub const fn unequal_batches(self) -> Self {
        Self { unequal: true, ..self }
    }

    /// Sets the number of rows of the batch, which cut tensors must have. It is for ranks that have none of these
    /// tensors, such as those in the middle of a pipeline.
    ///
    /// ```
    /// use candle_pipe::Kwargs;
    /// use candle_pipe::microbatch::Splitter;
    ///
    /// let batch = Splitter::new(4).rows(10).split(&[], &Kwargs::new(), None, None)?;
    /// assert_eq!(batch.rows(), [3, 3, 2, 2]);
    /// # Ok::<(), candle_pipe::Error>(())
    /// ```
    #[must_use]
    pub const fn rows(self, rows: usize) -> Self {
        Self { rows: Some(rows), ..self }
    }

    /// Cuts arguments like [`split_args_kwargs_into_chunks`], with the same errors.
    pub fn split(
        &self,
        args: &[Value],
        kwargs: &Kwargs,
        args_spec: Option<&[ChunkSpec]>,
        kwargs_spec: Option<&KwargsSpec>,
    ) -> Result<Microbatches> {
        if self.chunks == 0 {
            return Err(Error::Microbatches("a batch cannot be cut into 0 chunks; ask for 1 or more".into()));
        }
        let cuts = InputCuts::new(args, kwargs, args_spec, kwargs_spec)?;
        if !self.unequal {
            cuts.check_one_batch_size()?;
        }
        let chunks = cuts.cuts().map(|cut| cut.rows).chain(self.rows).fold(self.chunks, usize::min);
        cuts.check_rows(self.rows)?;
        if chunks > MOST_CHUNKS {
            return Err(Error::Microbatches(format!(
                "{chunks} chunks are too many; ask for {MOST_CHUNKS} at most"
            )));
        }
        if chunks < self.chunks {
            let asked = self.chunks;
            candle_dist::warn(format_args!(
                "a batch of {chunks} rows is cut into {chunks} microbatches, not into the {asked} that were asked for"
            ));
        }
        let rows = self.rows.or(cuts.cuts().next().map(|cut| cut.rows)).unwrap_or(chunks);
        let mut batch = Microbatches::new(microbatch_sizes(rows, chunks), self.masked);
        let mut dims = cuts.dims();
        let mut of = |value: &Value| dims.by_ref().take(value.tensors().len()).collect();
        batch.args_dims = args.iter().map(&mut of).collect();
        batch.kwargs_dims = kwargs.iter().map(|(name, value)| (name.clone(), of(value))).collect();
        drop(dims);
        for chunk in 0..chunks {
            let mut tensors = cuts.tensors();
            let mut piece = |tensor: &Tensor| match tensors.next().flatten() {
                Some(cut) => cut.piece(tensor, chunks, chunk, self.masked),
                None => Ok(tensor.clone()),
            };
            batch.args.push(args.iter().map(|value| value.rebuild(&mut piece)).collect::<Result<_>>()?);
            batch.kwargs.push(kwargs.rebuild(&mut piece)?);
        }
        Ok(batch)
    }
}
