//! A dim of a tensor cut into pieces.
use serde::{Deserialize, Serialize};
use smallvec::SmallVec;
use std::ops::Range;

/// A short list of sizes.
pub type Dims = SmallVec<[usize; 6]>;

/// The cut of a dim into pieces, one per rank.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize)]
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

    /// Creates a cut of `dim` into a piece of `len` for each of `ranks`.
    pub fn even(dim: usize, len: usize, ranks: usize) -> Self {
        Self { dim, sizes: Dims::from_elem(len, ranks) }
    }

    /// Returns the size of the whole dim.
    pub fn len(&self) -> usize {
        self.sizes.iter().sum()
    }

    /// Returns whether the dim has no elements.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the offset of the piece of `rank`.
    pub(crate) fn start(&self, rank: usize) -> usize {
        self.sizes[..rank].iter().sum()
    }

    /// Returns the piece of `rank`.
    pub(crate) fn piece(&self, rank: usize) -> Range<usize> {
        let start = self.start(rank);
        start..start + self.sizes[rank]
    }

    /// Checks that `shape` is that of the piece of `rank` of `ranks`.
    pub(crate) fn check_piece(&self, shape: &[usize], rank: usize, ranks: usize) -> Result<(), String> {
        let Self { dim, sizes } = self;
        let len = shape.get(*dim);
        let len = len.ok_or_else(|| format!("dim {dim} is out of range for a tensor of shape {shape:?}"))?;
        match sizes.len() == ranks && sizes[rank] == *len && total(sizes).is_some() {
            true => Ok(()),
            false => Err(format!(
                "sizes {sizes:?} of dim {dim} do not fit {ranks} ranks and a piece of shape {shape:?}"
            )),
        }
    }

    /// Checks that `shape` is that of the whole, for this many ranks.
    pub(crate) fn check_whole(&self, shape: &[usize], ranks: usize) -> Result<(), String> {
        let Self { dim, sizes } = self;
        match sizes.len() == ranks && total(sizes).is_some() && shape.get(*dim).copied() == total(sizes) {
            true => Ok(()),
            false => {
                Err(format!("sizes {sizes:?} do not cut dim {dim} of shape {shape:?} into {ranks} pieces"))
            }
        }
    }
}

/// Returns the sum of `sizes`, or `None` if it overflows.
pub(crate) fn total(sizes: &[usize]) -> Option<usize> {
    sizes.iter().try_fold(0usize, |sum, &size| sum.checked_add(size))
}
