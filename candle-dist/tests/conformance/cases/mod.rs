//! What every engine must do: cases that run on each rank of a world of any size, and compare with what follows from
//! the inputs of all ranks, which every rank can make.
pub mod arguments;
pub mod coalesced;
pub mod exchanges;
mod failures;
pub mod groups;
pub mod in_place;
pub mod messages;
pub mod pieces;
pub mod reductions;
pub mod started;
mod values;

pub use failures::FAILURES;

use candle_dist::{RankContext, Result};

/// One thing that every engine must do.
pub struct Case {
    pub name: &'static str,
    /// The smallest world that it makes sense on.
    pub least: usize,
    pub run: fn(&RankContext) -> Result<()>,
}

/// The cases, in groups.
pub const GROUPS: [(&str, &[Case]); 9] = [
    ("reductions", reductions::CASES),
    ("pieces", pieces::CASES),
    ("exchanges", exchanges::CASES),
    ("in_place", in_place::CASES),
    ("started", started::CASES),
    ("coalesced", coalesced::CASES),
    ("messages", messages::CASES),
    ("groups", groups::CASES),
    ("arguments", arguments::CASES),
];
