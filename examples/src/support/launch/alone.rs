//! Work of some ranks alone, for which the others wait.

use std::sync::mpsc;
use std::time::Duration;
use std::{panic, thread};

use candle_dist::ProcessGroup;

/// How often ranks that work alone signal to waiting ranks that they are alive.
const SIGN: Duration = Duration::from_millis(200);

/// The stack of work alone. candle walks a graph by recursion; only touched pages take memory.
const STACK_BYTES: usize = 256 << 20;

/// Calls `f` on rank 0; the other ranks of the group wait without a limit while rank 0 is alive. Every rank calls it.
///
/// # Errors
/// Those of `f`, on rank 0, and those of the group.
pub fn on_first<T: Send>(
    group: &ProcessGroup,
    f: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<Option<T>> {
    on_some(group, group.rank() == 0, f)
}

/// Calls `f` on the ranks with `works`; all ranks wait without a limit while these are alive. Every rank calls it.
///
/// # Errors
/// Those of `f`, on its rank, and those of the group.
pub fn on_some<T: Send>(
    group: &ProcessGroup,
    works: bool,
    f: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<Option<T>> {
    // Each signal is a call of all ranks, so that no call waits longer than its timeout allows.
    let others_work = |work: &str| anyhow::Ok(group.all_gather_text(work)?.iter().any(|work| work == WORKS));
    if !works {
        while others_work(ENDS)? {}
        return Ok(None);
    }
    thread::scope(|scope| {
        let (end, ended) = mpsc::channel();
        let alone =
            thread::Builder::new().name(format!("rank {} alone", group.rank())).stack_size(STACK_BYTES);
        let alone = alone.spawn_scoped(scope, move || {
            let made = f();
            // There is no receiver any more if the group has failed.
            end.send(()).ok();
            made
        })?;
        // A thread that panicked has dropped its end.
        while let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(SIGN) {
            others_work(WORKS)?;
        }
        let made = alone.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
        while others_work(ENDS)? {}
        made.map(Some)
    })
}

const WORKS: &str = "works";
const ENDS: &str = "ends";
