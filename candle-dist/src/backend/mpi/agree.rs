//! What the ranks tell each other, through rank 0, before any of them waits in MPI.
use super::Settings;
use crate::control::Control;
use crate::{Error, Result};

/// The key of a rank's settings.
fn settings_of(rank: usize) -> String {
    format!("candle-dist/mpi/settings/{rank}")
}

/// The key of rank 0's word that all ranks may go on.
const ALIKE: &str = "candle-dist/mpi/alike";

/// Returns when all ranks have come this far with the same settings; otherwise all get the same error.
pub(super) fn agree(control: &Control, settings: &Settings) -> Result<()> {
    let mine = settings.text();
    if control.rank() > 0 {
        control.set(&settings_of(control.rank()), mine.as_bytes())?;
        return control.get(ALIKE).map(drop);
    }
    for rank in 1..control.size() {
        let theirs = control.get(&settings_of(rank))?;
        if theirs != mine.as_bytes() {
            let theirs = String::from_utf8_lossy(&theirs);
            return Err(Error::Unsupported(format!(
                "mpi::Settings differ: {mine} on rank 0, {theirs} on rank {rank}; give all ranks the same"
            )));
        }
    }
    control.set(ALIKE, b"")
}
