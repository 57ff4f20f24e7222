//! How many threads candle uses in a program of tests.

#[doc(hidden)]
pub use ctor;

/// Settles how many threads candle uses, before the tests of a program begin: those of a world of
/// four threads, or one where ranks are processes.
///
/// The threads of the test harness keep a [`World`](candle_dist::World) from doing so. Tests that begin without a world of
/// [`Ranks`](crate::Ranks) would then count the processor's cores in each matrix product, and take ten times as long. Call it once, in
/// the root of the program.
///
/// ```
/// test_utils::settle_threads!();
/// # fn main() {
/// assert!(std::env::var_os("RAYON_NUM_THREADS").is_some());
/// # }
/// ```
#[macro_export]
macro_rules! settle_threads {
    () => {
        $crate::ctor::declarative::ctor! {
            #[ctor(unsafe, anonymous)]
            fn settle_threads() {
                $crate::settle();
            }
        }
    };
}

#[doc(hidden)]
pub fn settle() {
    // Ranks that are processes share the cores.
    let threads = if crate::over_mpi() { 1 } else { candle_dist::threads::default_per_rank(4) };
    candle_dist::threads::settle(threads);
}
