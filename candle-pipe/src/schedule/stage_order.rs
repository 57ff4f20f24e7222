//! The ranks of stages.

/// A rule for the rank of each stage.
///
/// ```
/// use candle_pipe::schedule::StageOrder;
///
/// assert_eq!(StageOrder::Loop.stage_ranks(3, 2), [0, 1, 2, 0, 1, 2]);
/// assert_eq!(StageOrder::V.stage_ranks(3, 2), [0, 1, 2, 2, 1, 0]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StageOrder {
    /// After the last rank the first one follows again.
    Loop,
    /// After the last rank the ranks follow in reverse, so that the last rank has two consecutive stages.
    V,
}

impl StageOrder {
    /// Returns the rank of each of the `ranks * stages_per_rank` stages.
    pub fn stage_ranks(self, ranks: usize, stages_per_rank: usize) -> Vec<usize> {
        let rank = |stage: usize| match (self, stage / ranks, stage % ranks) {
            (Self::V, turn, i) if turn % 2 == 1 => ranks - 1 - i,
            (_, _, i) => i,
        };
        (0..ranks * stages_per_rank).map(rank).collect()
    }
}
