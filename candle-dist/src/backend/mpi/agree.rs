//! Agreement of the ranks, through rank 0, before any of them waits in MPI.
use crate::control::Control;
use crate::{Error, Result};

/// Returns when all ranks have reached `stage` with the same `mine`; otherwise all get the same error.
pub(super) fn agree(control: &Control, stage: &str, mine: &str) -> Result<()> {
    let key = |whose: &str| format!("candle-dist/mpi/{stage}/{whose}");
    let alike = key("alike");
    if control.rank() > 0 {
        control.set(&key(&control.rank().to_string()), mine.as_bytes())?;
        return control.get_at_start(&alike).map(drop);
    }
    for rank in 1..control.size() {
        let theirs = control.get_at_start(&key(&rank.to_string()))?;
        if theirs != mine.as_bytes() {
            let theirs = String::from_utf8_lossy(&theirs);
            return Err(Error::Unsupported(format!(
                "mpi::Settings differ: {mine} on rank 0, {theirs} on rank {rank}; give all ranks the same"
            )));
        }
    }
    control.set(&alike, b"")
}
