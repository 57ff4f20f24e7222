//! The order of sums.

/// In which order the elements of ranks are added up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Sums {
    /// In rank order, bit for bit as on threads.
    #[default]
    RankOrder,
    /// In any order that is alike on all ranks and from run to run, where that is faster: 16-bit floats may be rounded
    /// after each addition.
    Any,
}
