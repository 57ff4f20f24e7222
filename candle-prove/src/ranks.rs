//! Runs a closure on several ranks, with a label and a deadline.
use candle_dist::{RankContext, World, WorldError, threads};
use parking_lot::{Condvar, Mutex};
use std::fmt::Display;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A world of threads for a test, with a number of ranks, a label and a deadline.
///
/// ```
/// use candle_prove::Ranks;
///
/// let ranks = Ranks::new(3, "who am I").run(|ctx| Ok::<_, candle_dist::Error>(ctx.rank())).unwrap();
/// assert_eq!(ranks, [0, 1, 2]);
/// ```
#[derive(Debug, Clone)]
pub struct Ranks {
    world: usize,
    label: String,
    deadline: Duration,
    timeout: Duration,
}

/// The reports of the ranks of one run so far.
struct RunReports<T> {
    results: Vec<Option<T>>,
    ended: usize,
    first_failure: Option<WorldError>,
}

impl Ranks {
    /// The stack size of a rank's thread. candle walks graphs recursively.
    #[doc(hidden)]
    pub const STACK_BYTES: usize = 256 << 20;

    /// What the error says of ranks that run at the deadline.
    #[doc(hidden)]
    pub const LATE: &'static str = "still run after";

    /// Creates a world of `world` ranks that may take two minutes. `label` names the test case in failures.
    pub fn new(world: usize, label: impl Into<String>) -> Self {
        let deadline = Duration::from_secs(120);
        Self { world, label: label.into(), deadline, timeout: deadline }
    }

    /// Sets how long the whole run, and each call in it, may take.
    pub fn deadline(self, deadline: Duration) -> Self {
        Self { deadline, timeout: deadline, ..self }
    }

    /// Sets how long a call may wait: as long as the whole run by default.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
    }

    /// Runs `f` on every rank. Returns the results in rank order, or the first failure with its rank.
    ///
    /// # Errors
    /// The first failure of a rank. Ranks that still run at the deadline are abandoned and named in the error, so a hang
    /// fails instead of blocking.
    pub fn run<T, E, F>(self, f: F) -> Result<Vec<T>, WorldError>
    where
        T: Send + 'static,
        E: Display,
        F: Fn(&RankContext) -> Result<T, E> + Send + Sync + 'static,
    {
        threads::settle(threads::default_per_rank(self.world));
        self.run_in(World::threads(self.world), &Arc::new(f))
    }

    /// Like [`run`](Self::run), on the ranks of this world, which are threads of this process.
    ///
    /// # Errors
    /// Those of [`run`](Self::run).
    pub fn run_in<T, E, F>(&self, world: World, f: &Arc<F>) -> Result<Vec<T>, WorldError>
    where
        T: Send + 'static,
        E: Display,
        F: Fn(&RankContext) -> Result<T, E> + Send + Sync + 'static,
    {
        let ranks = world.timeout(self.timeout).into_ranks().map_err(|e| self.fail(0, e.to_string()))?;
        self.run_on(ranks, f)
    }

    /// Like [`run`](Self::run), on these ranks of any world, each on a thread of its own; the results are in this order.
    ///
    /// # Errors
    /// Those of [`run`](Self::run).
    pub fn run_on<T, E, F>(&self, ranks: Vec<RankContext>, f: &Arc<F>) -> Result<Vec<T>, WorldError>
    where
        T: Send + 'static,
        E: Display,
        F: Fn(&RankContext) -> Result<T, E> + Send + Sync + 'static,
    {
        let numbers: Vec<usize> = ranks.iter().map(RankContext::rank).collect();
        let board =
            RunReports { results: numbers.iter().map(|_| None).collect(), ended: 0, first_failure: None };
        let shared = Arc::new((Mutex::new(board), Condvar::new()));
        let mut threads = Vec::new();
        for (nth, ctx) in ranks.into_iter().enumerate() {
            let (shared, f, rank) = (shared.clone(), f.clone(), ctx.rank());
            let work = move || {
                let blame = |rank: usize, message: &str| {
                    let error = WorldError::new(rank, message);
                    shared.0.lock().first_failure.get_or_insert(error);
                };
                let result = ctx.run(|ctx| f(ctx), blame);
                let mut board = shared.0.lock();
                board.results[nth] = result;
                board.ended += 1;
                shared.1.notify_all();
            };
            let thread = std::thread::Builder::new()
                .name(format!("rank {rank}"))
                .stack_size(Self::STACK_BYTES)
                .spawn(work);
            threads.push(thread.map_err(|e| self.fail(rank, format!("no thread: {e}")))?);
        }
        let until = Instant::now() + self.deadline;
        let mut board = shared.0.lock();
        while board.ended < numbers.len() {
            if shared.1.wait_until(&mut board, until).timed_out() && board.ended < numbers.len() {
                let late = numbers.iter().zip(&board.results).filter(|(_, result)| result.is_none());
                let late: Vec<usize> = late.map(|(&rank, _)| rank).collect();
                return Err(self.fail(late[0], format!("ranks {late:?} {} {:?}", Self::LATE, self.deadline)));
            }
        }
        drop(board);
        // What a thread still holds when its rank has ended, such as a group in its own memory, is gone then: MPI may end.
        threads.into_iter().for_each(|thread| drop(thread.join()));
        let mut board = shared.0.lock();
        if let Some(failure) = board.first_failure.take() {
            return Err(self.fail(failure.rank, failure.message));
        }
        let results = board.results.iter_mut().zip(&numbers);
        results
            .map(|(result, &rank)| result.take().ok_or_else(|| self.fail(rank, "no result".into())))
            .collect()
    }

    /// Returns an error of a rank, with the label.
    fn fail(&self, rank: usize, message: String) -> WorldError {
        WorldError::new(rank, format!("[{}] {message}", self.label))
    }
}
