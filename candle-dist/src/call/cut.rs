//! A dim cut into pieces.
use super::Dims;

/// A dim cut into one piece a rank.
#[derive(Debug, Clone, PartialEq)]
pub struct Cut {
    /// The dim.
    pub dim: usize,
    /// The pieces' sizes in rank order; they may differ and be zero.
    pub sizes: Dims,
}

impl Cut {
    /// A cut of `dim` into `sizes`.
    pub fn new(dim: usize, sizes: &[usize]) -> Self {
        Self { dim, sizes: Dims::from_slice(sizes) }
    }

    /// Where the piece of `rank` begins.
    pub(crate) fn start(&self, rank: usize) -> usize {
        self.sizes[..rank].iter().sum()
    }
}

/// The sum of sizes, unless it is more than can be counted.
pub(crate) fn total(sizes: &[usize]) -> Option<usize> {
    sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size))
}
