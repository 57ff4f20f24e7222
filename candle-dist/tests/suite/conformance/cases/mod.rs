//! The requirements for every backend: cases that run on each rank of a world of any size. Every rank computes the
//! inputs of all ranks, and compares the results with them.
pub(crate) mod arguments;
pub(crate) mod coalesced;
pub(crate) mod exchanges;
mod failures;
pub(crate) mod groups;
pub(crate) mod in_place;
pub(crate) mod into;
pub(crate) mod messages;
pub(crate) mod objects;
pub(crate) mod pieces;
pub(crate) mod reductions;
pub(crate) mod started;
mod values;

pub(crate) use failures::FAILURES;

use candle_dist::{RankContext, Result};

/// One requirement for every backend.
pub(crate) struct Case {
    pub(crate) name: &'static str,
    /// The smallest world in which it applies.
    pub(crate) least: usize,
    pub(crate) run: fn(&RankContext) -> Result<()>,
}

/// The cases, in groups.
pub(crate) const GROUPS: [(&str, &[Case]); 11] = [
    ("reductions", reductions::CASES),
    ("pieces", pieces::CASES),
    ("exchanges", exchanges::CASES),
    ("in_place", in_place::CASES),
    ("into", into::CASES),
    ("started", started::CASES),
    ("coalesced", coalesced::CASES),
    ("messages", messages::CASES),
    ("objects", objects::CASES),
    ("groups", groups::CASES),
    ("arguments", arguments::CASES),
];
