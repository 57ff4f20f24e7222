//! Communication of a training step.

use candle_dist::comm::CommCounts;
use serde::{Deserialize, Serialize};

/// Count and bytes of one kind of collective in a step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CommStat {
    /// Name of the collective.
    pub op: String,
    /// Calls per step on one rank.
    pub count: usize,
    /// Bytes of the operands of these calls on one rank.
    pub bytes: usize,
}

impl CommStat {
    /// Returns the kinds that occurred in a step.
    pub fn all(counts: &CommCounts) -> Vec<Self> {
        Self::per_step(counts, 1)
    }

    /// Returns the kinds that occurred in `steps` steps, as means per step.
    pub fn per_step(counts: &CommCounts, steps: usize) -> Vec<Self> {
        let mean = |total: usize| total / steps.max(1);
        counts
            .iter()
            .map(|(op, c)| Self { op: op.name().to_owned(), count: mean(c.count), bytes: mean(c.bytes) })
            .collect()
    }
}
