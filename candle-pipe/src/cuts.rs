//! Cuts of batches into microbatches: sizes and dims.
use std::ops::Range;

/// Returns the sizes of `chunks` pieces of `rows` rows, as `torch.tensor_split`: the first `rows % chunks` pieces have
/// one row more.
///
/// ```
/// use candle_pipe::microbatch::microbatch_sizes;
///
/// assert_eq!(microbatch_sizes(10, 4), [3, 3, 2, 2]);
/// ```
pub fn microbatch_sizes(rows: usize, chunks: usize) -> Vec<usize> {
    (0..chunks).map(|chunk| chunk_range(rows, chunks, chunk).len()).collect()
}

/// Returns the rows of one of `chunks` pieces.
pub(crate) fn chunk_range(rows: usize, chunks: usize, chunk: usize) -> Range<usize> {
    let (size, larger) = (rows / chunks, rows % chunks);
    let start = |chunk: usize| chunk * size + chunk.min(larger);
    start(chunk)..start(chunk + 1)
}

/// The dim along which each tensor of an argument is cut, in the tree's order; `None` if it is not cut.
pub(crate) type CutDims = Vec<Option<usize>>;
