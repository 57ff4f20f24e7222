//! From the name of a run to its outcome.

use super::args::{Args, RunName};
use super::corpus::Corpus;
use super::outcome::RunOutcome;
use super::single;

/// The runs that [`run_one`] can make.
pub const AVAILABLE: &[RunName] = &[RunName::Single];

/// Trains the model in the way called `name`.
///
/// # Errors
/// If the run fails, or is not [`AVAILABLE`].
pub fn run_one(name: RunName, args: &Args, corpus: &Corpus) -> anyhow::Result<RunOutcome> {
    match name {
        RunName::Single => single::train(args, corpus),
        RunName::Tp | RunName::TpSp => anyhow::bail!("the run {name} is not available"),
    }
}
