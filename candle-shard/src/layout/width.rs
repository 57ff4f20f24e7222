//! Sizes of dims that are cut only between units.
use super::spec::chunk_sizes;
use candle_dist::backend::Dims;

/// The size of a dim made of units that are never cut, such as attention heads.
///
/// A number is a width of that many units of size 1.
///
/// ```
/// use candle_shard::nn::Width;
///
/// let heads = Width::new(6, 4);
/// assert_eq!(heads.size(), 24);
/// assert_eq!(heads.cut(4).as_slice(), [8, 8, 8, 0]); // 2, 2, 2 and no heads
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Width {
    /// The number of units.
    pub units: usize,
    /// The size of a unit.
    pub unit: usize,
}

impl Width {
    /// Creates a width of `units` units of size `unit`.
    pub const fn new(units: usize, unit: usize) -> Self {
        Self { units, unit }
    }

    /// Returns the size of the dim.
    pub const fn size(self) -> usize {
        self.units.saturating_mul(self.unit)
    }

    /// Returns the sizes of the shards on `ranks` ranks: units are distributed as by [`chunk_sizes`].
    pub fn cut(self, ranks: usize) -> Dims {
        chunk_sizes(self.units, ranks).iter().map(|units| units * self.unit).collect()
    }
}

impl From<usize> for Width {
    fn from(size: usize) -> Self {
        Self::new(size, 1)
    }
}
