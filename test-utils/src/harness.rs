//! Runs a closure on several ranks, with a label and a deadline.
use crate::backend::{self, over_nccl};
use candle_core::Device;
use candle_dist::{RankContext, WorldError, threads};
use parking_lot::{Condvar, Mutex};
use std::cell::RefCell;
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// The stack size of a rank's thread. candle walks graphs recursively.
const STACK_BYTES: usize = 256 << 20;

thread_local! {
    static DEVICE: RefCell<Device> = const { RefCell::new(Device::Cpu) };
}

/// Returns the device of the rank that this thread is in a world of [`Ranks`], otherwise the host.
///
/// Helpers of tests make their tensors on it, so that the same test runs on the host and on GPUs.
pub fn device() -> Device {
    DEVICE.with_borrow(Device::clone)
}

/// A world for a test, with a number of ranks, a label and a deadline.
///
/// ```
/// use test_utils::Ranks;
///
/// let ranks = Ranks::new(3, "who am I").run(|ctx| Ok::<_, candle_dist::Error>(ctx.rank())).unwrap();
/// assert_eq!(ranks, [0, 1, 2]);
/// ```
#[derive(Debug, Clone)]
pub struct Ranks {
    world: usize,
    label: String,
    deadline: Duration,
}

/// The reports of the ranks of one run so far.
struct Board<T> {
    results: Vec<Option<T>>,
    ended: usize,
    first_failure: Option<WorldError>,
}

impl Ranks {
    /// Creates a world of `world` ranks. `label` names the test case in failures.
    pub fn new(world: usize, label: impl Into<String>) -> Self {
        Self { world, label: label.into(), deadline: Duration::from_secs(if over_nccl() { 600 } else { 120 }) }
    }

    /// Sets how long the whole run may take; two minutes by default, and ten over NCCL, which may be simulated.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        self.deadline = deadline;
        self
    }

    /// Runs `f` on every rank. Returns the results in rank order, or the first failure with its rank.
    ///
    /// Ranks that still run at the deadline are abandoned and named in the error, so a hang fails instead of blocking.
    pub fn run<T, E, F>(self, f: F) -> Result<Vec<T>, WorldError>
    where
        T: Send + 'static,
        E: Display,
        F: Fn(&RankContext) -> Result<T, E> + Send + Sync + 'static,
    {
        let fail = |rank, message: String| WorldError { rank, message: format!("[{}] {message}", self.label) };
        // SAFETY: tests run one at a time, and the thread of the test program only waits for them.
        unsafe { threads::settle_among_threads(threads::default_per_rank(self.world)) };
        let world = backend::open(self.world).map_err(|message| fail(0, message))?;
        let ranks = world.timeout(self.deadline).into_ranks().map_err(|e| fail(0, e.to_string()))?;
        let board = Board { results: (0..self.world).map(|_| None).collect(), ended: 0, first_failure: None };
        let shared = Arc::new((Mutex::new(board), Condvar::new()));
        let f = Arc::new(f);
        for ctx in ranks {
            let (shared, f, rank) = (shared.clone(), f.clone(), ctx.rank());
            let work = move || {
                let blame = |rank: usize, message: &str| {
                    let error = WorldError { rank, message: message.to_string() };
                    shared.0.lock().first_failure.get_or_insert(error);
                };
                DEVICE.set(ctx.device().clone());
                let result = ctx.run(|ctx| f(ctx), blame);
                // The device ends before the thread's own memory does.
                DEVICE.set(Device::Cpu);
                let mut board = shared.0.lock();
                board.results[rank] = result;
                board.ended += 1;
                shared.1.notify_all();
            };
            let thread = std::thread::Builder::new().name(format!("rank {rank}")).stack_size(STACK_BYTES).spawn(work);
            thread.map_err(|e| fail(rank, format!("no thread: {e}")))?;
        }
        let until = Instant::now() + self.deadline;
        let mut board = shared.0.lock();
        while board.ended < self.world {
            if shared.1.wait_until(&mut board, until).timed_out() && board.ended < self.world {
                let late: Vec<usize> = (0..self.world).filter(|&r| board.results[r].is_none()).collect();
                return Err(fail(late[0], format!("ranks {late:?} still run after {:?}", self.deadline)));
            }
        }
        if let Some(failure) = board.first_failure.take() {
            return Err(fail(failure.rank, failure.message));
        }
        board.results.iter_mut().enumerate().map(|(r, v)| v.take().ok_or_else(|| fail(r, "no result".into()))).collect()
    }
}

/// Runs `f` on `world` ranks and panics with the first failure. Most tests use this.
///
/// # Panics
/// If a rank fails or panics, or if the run takes more than two minutes, or ten over NCCL.
pub fn on_ranks<T, E, F>(world: usize, label: &str, f: F) -> Vec<T>
where
    T: Send + 'static,
    E: Display,
    F: Fn(&RankContext) -> Result<T, E> + Send + Sync + 'static,
{
    match Ranks::new(world, label).run(f) {
        Ok(results) => results,
        Err(error) => panic!("{error}"),
    }
}
