//! The orders of the known schedules, one function per kind.
mod building_block;
mod dualpipev;
mod greedy;
mod interleaved;
mod order;
mod single;
mod zbv;

pub(super) use building_block::{v_half, v_min};
pub(super) use dualpipev::dualpipev;
pub use greedy::greedy;
pub(super) use interleaved::{interleaved_1f1b, interleaved_zb, looped_bfs};
pub(super) use single::{eager_1f1b, gpipe, one_f_one_b, zb_h1, zb_h2};
pub(super) use zbv::zbv;

use super::Action;
use order::PassOrder;

/// The most forwards of a step.
pub(super) const LARGEST: usize = 1 << 20;

/// The most stages: the time to generate and to check a schedule grows with their square.
pub(super) const MOST_STAGES: usize = 1 << 12;

/// The actions of each rank.
pub(super) type Orders = Vec<Vec<Action>>;

/// The size of a pipeline and its step; no field is 0.
pub(super) struct Size {
    pub(super) ranks: usize,
    pub(super) microbatches: usize,
    pub(super) stages_per_rank: usize,
}

impl Size {
    /// Returns the number of rounds, each with at least as many microbatches as ranks if there are that many.
    pub(super) fn rounds(&self) -> usize {
        (self.microbatches / self.ranks).max(1)
    }

    /// Generates the order of each rank separately.
    fn each_rank(&self, order: impl Fn(usize) -> PassOrder) -> Orders {
        (0..self.ranks).map(|rank| order(rank).actions).collect()
    }
}
