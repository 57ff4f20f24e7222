//! Work on the threads of a rank.
//!
//! Each thread that computes, such as a rank, is a worker of a pool of its own, so ranks of one process do not share
//! theirs, and the rank itself works too. candle's matrix products use the pool of the thread that calls them.
//!
//! rayon is generic: each closure that it is given compiles thousands of lines of it again. Here it gets closures of
//! one type.
use candle_core::utils::get_num_threads;
use rayon::{ThreadPool, ThreadPoolBuilder};
use std::cell::{Cell, OnceCell};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

thread_local! {
    /// The pool of this thread, which ends with it; none if the system has no threads for it.
    static POOL: OnceCell<Option<Workers>> = const { OnceCell::new() };

    /// Whether this thread computes a piece of work alone.
    static IS_ALONE: Cell<bool> = const { Cell::new(false) };

    /// Whether this thread looks for work.
    static IS_LOOKING: Cell<bool> = const { Cell::new(false) };
}

/// The cores of this process.
static CORES: OnceLock<usize> = OnceLock::new();

/// Pieces of work for each thread: threads that are done take pieces of others.
const PIECES: usize = 8;

/// Multiplications from which a matrix product gets several threads, candle's own products too: some 80 µs on one thread. A thread that sleeps
/// needs about as long until it helps.
pub(super) const PRODUCT: usize = 4 << 20;

/// Returns how many threads a large piece of work gets, and makes them this thread's.
pub(super) fn threads() -> usize {
    if IS_ALONE.get() {
        return 1;
    }
    let threads = get_num_threads();
    if threads > 1 && rayon::current_thread_index().is_none() {
        // This thread is one of the workers. rayon keeps some kilobytes for it, also after its end.
        POOL.with(|made| _ = made.get_or_init(|| Workers::new(threads)));
    }
    threads
}

/// The threads of a thread that computes.
struct Workers {
    pool: ThreadPool,
    awake: Arc<AwakeWorkers>,
}

/// How workers stay awake between two pieces of work.
struct AwakeWorkers {
    owner: thread::ThreadId,
    /// How many look for work, and do not sleep, or are asked to.
    count: AtomicUsize,
}

/// The threads of all pools of this process.
static THREADS: AtomicUsize = AtomicUsize::new(0);

/// How long a worker looks for work before it sleeps: longer than what a rank does alone between two products of a token.
const AWAKE: Duration = Duration::from_micros(200);

impl Workers {
    fn new(threads: usize) -> Option<Self> {
        gemm::set_threading_threshold(PRODUCT);
        let pool = ThreadPoolBuilder::new().num_threads(threads).use_current_thread().build().ok()?;
        THREADS.fetch_add(threads, Ordering::Relaxed);
        Some(Self {
            pool,
            awake: Arc::new(AwakeWorkers { owner: thread::current().id(), count: AtomicUsize::new(0) }),
        })
    }

    /// See [`keep_awake`]. Workers sleep where threads share cores.
    fn keep_awake(&self) {
        let cores = *CORES.get_or_init(|| thread::available_parallelism().map_or(1, usize::from));
        if THREADS.load(Ordering::Relaxed) > cores {
            return;
        }
        let workers = self.pool.current_num_threads() - 1;
        if self.awake.count.load(Ordering::Relaxed) < workers {
            let awake = Arc::clone(&self.awake);
            awake.count.fetch_add(workers, Ordering::Relaxed);
            self.pool.spawn_broadcast(move |_| awake.look_for_work());
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        THREADS.fetch_sub(self.pool.current_num_threads(), Ordering::Relaxed);
    }
}

impl AwakeWorkers {
    fn look_for_work(&self) {
        if thread::current().id() == self.owner {
            return;
        }
        // A worker that looks already finds this like any work.
        if !IS_LOOKING.replace(true) {
            let mut last = Instant::now();
            while last.elapsed() < AWAKE {
                match rayon::yield_now() {
                    Some(rayon::Yield::Executed) => last = Instant::now(),
                    // Others may need this core, such as candle's own threads.
                    _ => thread::yield_now(),
                }
            }
            IS_LOOKING.set(false);
        }
        self.count.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Lets the workers of this thread look for work until there is none for a while. For the work on single tokens: its pieces are as short as
/// it takes to wake a thread, and threads that look for work are in the way of candle's own.
pub(super) fn keep_awake() {
    if threads() > 1 {
        POOL.with(|workers| workers.get().and_then(Option::as_ref).map(Workers::keep_awake));
    }
}

/// Runs `f`, all of whose work this thread does alone, as other threads have work of their own.
pub(super) fn alone<R>(f: impl FnOnce() -> R) -> R {
    struct AloneGuard(bool);
    impl Drop for AloneGuard {
        fn drop(&mut self) {
            IS_ALONE.set(self.0);
        }
    }
    let _before = AloneGuard(IS_ALONE.replace(true));
    f()
}

/// Returns `run` of each part with its number, in order; computed by several threads, if the work is worth it.
///
/// All parts run, also after one whose result is an error.
pub(super) fn map<P: Send, R: Send>(
    is_worth_it: bool,
    parts: impl Iterator<Item = P>,
    run: impl Fn(usize, P) -> R + Sync,
) -> Vec<R> {
    if is_worth_it && threads() > 1 {
        on_threads(parts, run)
    } else {
        parts.enumerate().map(|(i, part)| run(i, part)).collect()
    }
}

fn on_threads<P: Send, R: Send>(
    parts: impl Iterator<Item = P>,
    run: impl Fn(usize, P) -> R + Sync,
) -> Vec<R> {
    // A part and its result are touched by one thread at a time, so no lock is ever waited for.
    let slots: Vec<_> = parts.map(|part| Mutex::new((Some(part), None))).collect();
    for_each(slots.len(), &|i| {
        let mut slot = slots[i].lock().unwrap_or_else(PoisonError::into_inner);
        slot.1 = slot.0.take().map(|part| run(i, part));
    });
    slots.into_iter().filter_map(|slot| slot.into_inner().unwrap_or_else(PoisonError::into_inner).1).collect()
}

/// Calls `run` with each number below `count`, on the threads of this thread's pool.
///
/// Threads take the numbers in order, so work that gets smaller is cut evenly.
fn for_each(count: usize, run: &(dyn Fn(usize) + Sync)) {
    let threads = rayon::current_num_threads();
    let piece = (count / (PIECES * threads)).max(1);
    let next = AtomicUsize::new(0);
    let take = || loop {
        let start = next.fetch_add(piece, Ordering::Relaxed);
        if start >= count {
            return;
        }
        (start..count.min(start + piece)).for_each(run);
    };
    rayon::scope(|scope| {
        (1..threads.min(count.div_ceil(piece))).for_each(|_| scope.spawn(|_| take()));
        take();
    });
}

/// Returns the work of the busiest of simulated threads, which take parts of these costs in order, one whenever they are done.
pub(super) fn busiest(costs: &[usize], threads: usize) -> usize {
    let mut busy = vec![0; threads];
    for cost in costs {
        if let Some(first) = busy.iter_mut().min() {
            *first += cost;
        }
    }
    busy.into_iter().max().unwrap_or(0)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn each_part_is_taken_once_and_results_are_in_order() {
        let mut numbers: Vec<usize> = (0..1000).collect();
        let add = |i: usize, part: &mut [usize]| {
            part.iter_mut().for_each(|number| *number += 1);
            (i, part[0])
        };
        let wanted = |added: usize| (0..1000).step_by(7).map(|at| at + added).enumerate().collect::<Vec<_>>();
        assert_eq!(on_threads(numbers.chunks_mut(7), add), wanted(1));
        assert_eq!(map(true, numbers.chunks_mut(7), add), wanted(2));
        assert_eq!(map(false, numbers.chunks_mut(7), add), wanted(3));
        assert_eq!(numbers, (3..1003).collect::<Vec<_>>());
        assert!(on_threads(std::iter::empty::<usize>(), |_, part| part).is_empty());
    }

    #[test]
    fn each_thread_that_computes_has_a_pool_of_its_own() {
        let workers = || {
            let pool = ThreadPoolBuilder::new().num_threads(3).use_current_thread().build().unwrap();
            let own = std::thread::current().id();
            let others: Vec<_> = pool.broadcast(|_| std::thread::current().id());
            assert!(others.contains(&own) && others.len() == 3);
            let seen = on_threads(0..100, |_, _| std::thread::current().id());
            assert!(seen.iter().all(|id| others.contains(id)));
            others
        };
        let [a, b] = std::thread::scope(|scope| {
            [scope.spawn(workers), scope.spawn(workers)].map(|thread| thread.join().unwrap())
        });
        assert!(a.iter().all(|id| !b.contains(id)));
    }

    #[test]
    fn workers_that_stay_awake_work_and_sleep_at_last() {
        thread::spawn(|| {
            let workers = Workers::new(2).unwrap();
            let awake = || workers.awake.count.load(Ordering::Relaxed);
            // Other pools may have the cores.
            let is_alone = THREADS.load(Ordering::Relaxed) <= thread::available_parallelism().unwrap().get();
            workers.keep_awake();
            assert_eq!(awake() > 0, is_alone);
            let mut numbers = [0; 100];
            for round in 1..=1000 {
                workers.keep_awake();
                assert!(awake() <= 1);
                on_threads(numbers.chunks_mut(7), |_, part| part.iter_mut().for_each(|number| *number += 1));
                assert_eq!(numbers, [round; 100]);
            }
            while awake() > 0 {
                thread::yield_now();
            }
        })
        .join()
        .unwrap();
    }

    #[test]
    fn a_panic_reaches_the_caller() {
        let panicked = std::panic::catch_unwind(|| on_threads(0..10, |_, part| assert_ne!(part, 5)));
        assert!(panicked.is_err());
    }
}
