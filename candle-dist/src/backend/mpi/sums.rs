//! The order of sums.

/// The order in which the elements of ranks are summed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Sums {
    /// In rank order, bit-identical to threads.
    #[default]
    RankOrder,
    /// In any order that is equal on all ranks and in every run, if that is faster. 16-bit floats may be rounded after
    /// each addition.
    Any,
}
