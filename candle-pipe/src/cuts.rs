//! How batches are cut into microbatches: how many rows each has, and along which dims.
use std::ops::Range;

/// The sizes of `chunks` pieces of `rows` rows, as `torch.tensor_split` makes them: the first `rows % chunks` have one
/// row more.
///
/// ```
/// use candle_pipe::microbatch::microbatch_sizes;
///
/// assert_eq!(microbatch_sizes(10, 4), [3, 3, 2, 2]);
/// ```
pub fn microbatch_sizes(rows: usize, chunks: usize) -> Vec<usize> {
    (0..chunks).map(|chunk| chunk_range(rows, chunks, chunk).len()).collect()
}

/// The rows of one of `chunks` pieces.
pub(crate) fn chunk_range(rows: usize, chunks: usize, chunk: usize) -> Range<usize> {
    let (size, larger) = (rows / chunks, rows % chunks);
    let start = |chunk: usize| chunk * size + chunk.min(larger);
    start(chunk)..start(chunk + 1)
}

/// For each tensor of an argument, in the tree's order, the dim that it is cut along, if it is cut.
pub(crate) type Dims = Vec<Option<usize>>;
