//! A dim of a tensor cut into pieces.
use super::Dims;

/// The cut of a dim into pieces, one per rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Cut {
    /// The dim that is cut.
    pub dim: usize,
    /// The sizes of the pieces in rank order. They may differ, and they may be zero.
    pub sizes: Dims,
}

impl Cut {
    /// Creates a cut of `dim` into pieces of these sizes.
    pub fn new(dim: usize, sizes: &[usize]) -> Self {
        Self { dim, sizes: Dims::from_slice(sizes) }
    }

    /// Returns the offset of the piece of `rank`.
    pub(crate) fn start(&self, rank: usize) -> usize {
        self.sizes[..rank].iter().sum()
    }
}

/// Returns the sum of `sizes`, or `None` if it overflows.
pub(crate) fn total(sizes: &[usize]) -> Option<usize> {
    sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size))
}
