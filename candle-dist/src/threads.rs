//! How many threads candle computes with, settled before the first tensor op.
//!
//! candle's CPU pools belong to the process, and one of them is a lock that a whole elementwise op holds: ranks that
//! are threads wait for each other on it unless each rank computes inline. Both pools read their variable
//! (`CANDLE_NUM_THREADS`, `RAYON_NUM_THREADS`) once, so the choice is made once, by the first local world.
use std::sync::OnceLock;

static SETTLED: OnceLock<usize> = OnceLock::new();

/// The number of threads a rank computes with when nothing is said: the cores divided by the ranks, at least one.
pub fn default_per_rank(ranks: usize) -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).checked_div(ranks).unwrap_or(1).max(1)
}

/// Settles the compute threads of every rank of this process, and returns the number in force.
///
/// The first call wins, and variables that are already in the environment win over it. Call it before the first
/// tensor op; [`World`](crate::World) does it for you.
pub fn settle(per_rank: usize) -> usize {
    *SETTLED.get_or_init(|| {
        for name in ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"] {
            if std::env::var_os(name).is_none() {
                // SAFETY: std serialises all access to the environment made from Rust, which is how candle and rayon
                // read it. Only foreign code that calls `getenv` in another thread at this very moment could observe
                // a torn update; this runs once, before any rank exists.
                unsafe { std::env::set_var(name, per_rank.max(1).to_string()) };
            }
        }
        std::env::var("CANDLE_NUM_THREADS").ok().and_then(|n| n.parse().ok()).unwrap_or(per_rank)
    })
}
