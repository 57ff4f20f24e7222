//! Runs by name.

use super::args::{Args, RunName};
use super::corpus::Corpus;
use super::outcome::RunOutcome;
use super::{sharded, single, staged};
use crate::launch::Ranks;

/// Trains the model as run `name`. The outcome is on rank 0, which makes the run on one device alone.
///
/// # Errors
/// If the run fails.
pub fn run_one(
    name: RunName,
    args: &Args,
    corpus: &Corpus,
    ranks: &Ranks<'_>,
) -> anyhow::Result<Option<RunOutcome>> {
    match name {
        RunName::Single => ranks.on_first(|| single::train(args, corpus, ranks.device())),
        RunName::Tp | RunName::TpSp | RunName::Cp | RunName::Ep => sharded::train(name, args, corpus, ranks),
        RunName::Pp | RunName::PpSp => staged::train(name, args, corpus, ranks),
    }
}
