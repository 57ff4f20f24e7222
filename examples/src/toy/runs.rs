//! From the name of a run to its outcome.

use super::args::{Args, RunName};
use super::corpus::Corpus;
use super::outcome::RunOutcome;
use super::{sharded, single, staged};

/// Trains the model in the way called `name`.
///
/// # Errors
/// If the run fails.
pub fn run_one(name: RunName, args: &Args, corpus: &Corpus) -> anyhow::Result<RunOutcome> {
    match name {
        RunName::Single => single::train(args, corpus),
        RunName::Tp | RunName::TpSp => sharded::train(name, args, corpus),
        RunName::Pp | RunName::PpSp => staged::train(name, args, corpus),
    }
}
