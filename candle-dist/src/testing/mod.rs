//! The conformance suite: the requirements for every backend, as cases that run on each rank of a world of any size.
//!
//! Each rank computes the inputs of all ranks, and compares the results with them. A case panics where a result is wrong, as a
//! test does, and returns the errors of communication. The cargo feature `testing` has this module.
//!
//! ```
//! use candle_dist::World;
//! use candle_dist::testing::GROUPS;
//!
//! // Put your backend around the one of the world, or start processes with `init_process_group_with`.
//! let world = || World::threads(2).wrap_backend(|inner| inner);
//! for (_, cases) in GROUPS.iter().filter(|(name, _)| *name == "groups") {
//!     for case in cases.iter().filter(|case| case.least <= 2) {
//!         world().run(case.run)?;
//!     }
//! }
//! # Ok::<(), candle_dist::WorldError>(())
//! ```
#![allow(clippy::unwrap_used)] // a panic is how a case fails
mod arguments;
mod coalesced;
mod exchanges;
mod failures;
mod groups;
mod in_place;
mod into;
mod lacks;
mod messages;
mod objects;
mod pieces;
mod reductions;
mod started;
mod values;
mod written;

pub use failures::{FAILURES, Failure};
pub use lacks::{LACKS, Lack, lack};

use crate::{RankContext, Result};

/// One requirement for every backend.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Case {
    /// Its name, for reports.
    pub name: &'static str,
    /// The smallest world in which it applies.
    pub least: usize,
    /// Runs it as one rank. All ranks of the world run it.
    pub run: fn(&RankContext) -> Result<()>,
}

/// The cases, in groups.
pub const GROUPS: [(&str, &[Case]); 11] = [
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
