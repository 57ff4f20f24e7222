//! How many threads candle computes with.

/// Gives every rank `threads` compute threads.
///
/// candle's thread pools belong to the process and read their size once, at the first tensor op: with more than one
/// thread, ranks that are threads wait for each other at a pool's lock.
///
/// # Safety
/// Must be called before the program starts a second thread and before its first tensor op.
pub unsafe fn settle(threads: usize) {
    for pool in ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"] {
        // SAFETY: the caller promises that no other thread can be reading the environment.
        unsafe { std::env::set_var(pool, threads.to_string()) };
    }
}
