//! Agreement of the ranks, through rank 0, before any of them waits in MPI.
use crate::control::Control;
use crate::{Error, Result};

/// Returns when all ranks have reached `stage` with the same `mine`; otherwise all get the same error. The result is what rank 0
/// decides then.
pub(super) fn agree(
    control: &Control,
    stage: &str,
    mine: &str,
    decide: impl FnOnce() -> Result<Vec<u8>>,
) -> Result<Vec<u8>> {
    control.decide(stage, mine.as_bytes(), |all| {
        match all.iter().position(|theirs| theirs != mine.as_bytes()) {
            None => decide(),
            Some(rank) => {
                let theirs = String::from_utf8_lossy(&all[rank]);
                Err(Error::Unsupported(format!(
                    "mpi::Settings differ: {mine} on rank 0, {theirs} on rank {rank}; give all ranks the same"
                )))
            }
        }
    })
}
