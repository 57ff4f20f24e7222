//! An allocator that counts, and the most bytes that ranks take.
use candle_dist::{RankContext, World};
use candle_shard::Result;
use peak_alloc::PeakAlloc;
use std::sync::{Mutex, MutexGuard, PoisonError};

#[global_allocator]
pub(crate) static MEMORY: PeakAlloc = PeakAlloc;

/// One test at a time, since memory is the process's.
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    // Other threads of candle's would have memory of their own.
    // SAFETY: tests run one at a time, and the test program's own thread only waits for them.
    unsafe { candle_dist::threads::settle_among_threads(1) };
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The most bytes for each of `ranks` ranks from when `make` has made what `run` uses, what it made among them.
pub(crate) fn peak_of<T>(
    ranks: usize,
    make: impl Fn(&RankContext) -> Result<T> + Sync,
    run: impl Fn(&T) -> Result<()> + Sync,
) -> usize {
    let before = MEMORY.current_usage();
    let peaks = World::threads(ranks).run(|ctx| -> Result<usize> {
        let made = make(ctx)?;
        ctx.group().barrier()?;
        if ctx.rank() == 0 {
            MEMORY.reset_peak_usage();
        }
        ctx.group().barrier()?;
        (0..3).try_for_each(|_| run(&made))?;
        ctx.group().barrier()?;
        Ok(MEMORY.peak_usage())
    });
    (peaks.unwrap()[0] - before) / ranks
}
