//! Work of rank 0 alone, for which the others wait.

use std::sync::mpsc;
use std::time::Duration;
use std::{panic, thread};

use candle_dist::ProcessGroup;

/// How often rank 0 signals to waiting ranks that it is alive while it works alone.
const SIGN: Duration = Duration::from_millis(200);

/// The stack of the work of rank 0 alone. candle walks a graph by recursion; only touched pages take memory.
const STACK_BYTES: usize = 256 << 20;

/// Calls `f` on rank 0; the other ranks of the group wait without a limit while rank 0 is alive. Every rank calls it.
///
/// # Errors
/// Those of `f`, on rank 0, and those of the group.
pub fn on_first<T: Send>(
    group: &ProcessGroup,
    f: impl FnOnce() -> anyhow::Result<T> + Send,
) -> anyhow::Result<Option<T>> {
    let (works, ends) = ("works", "ends");
    if group.rank() != 0 {
        while group.all_gather_text("")?[0] == works {}
        return Ok(None);
    }
    // Each signal is a call of all ranks, so that no call waits longer than its timeout allows.
    thread::scope(|scope| {
        let (end, ended) = mpsc::channel();
        let alone = thread::Builder::new().name("rank 0 alone".into()).stack_size(STACK_BYTES);
        let alone = alone.spawn_scoped(scope, move || {
            let made = f();
            // There is no receiver any more if the group has failed.
            end.send(()).ok();
            made
        })?;
        // A thread that panicked has dropped its end.
        while let Err(mpsc::RecvTimeoutError::Timeout) = ended.recv_timeout(SIGN) {
            group.all_gather_text(works)?;
        }
        let made = alone.join().unwrap_or_else(|panic| panic::resume_unwind(panic));
        group.all_gather_text(ends)?;
        made.map(Some)
    })
}
