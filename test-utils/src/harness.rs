//! Runs a closure on several ranks, with a label and a deadline.
use crate::backend;
#[cfg(feature = "mpi")]
use crate::processes;
use candle_core::Device;
use candle_dist::{RankContext, World, WorldError, threads};
use std::cell::RefCell;
use std::fmt::Display;
use std::sync::Arc;
use std::time::Duration;

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
    timeout: Duration,
}

impl Ranks {
    /// Creates a world of `world` ranks. `label` names the test case in failures.
    pub fn new(world: usize, label: impl Into<String>) -> Self {
        let seconds = match backend::backend_name() {
            "nccl" => 600,
            "mpi" => 300,
            _ => 120,
        };
        let deadline = Duration::from_secs(seconds);
        Self { world, label: label.into(), deadline, timeout: deadline }
    }

    /// Sets how long the whole run may take; two minutes by default, five over MPI, and ten over NCCL, which may be
    /// simulated.
    pub fn deadline(mut self, deadline: Duration) -> Self {
        // Processes share the cores, and their worlds take longer to open.
        self.deadline = if backend::over_mpi() { deadline * 6 } else { deadline };
        self.timeout = self.deadline;
        self
    }

    /// Sets how long a call may wait: as long as the whole run by default. Over NCCL, ranks that wait for each other in
    /// different groups are found no earlier.
    pub fn timeout(self, timeout: Duration) -> Self {
        Self { timeout, ..self }
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
        let f = Arc::new(f);
        #[cfg(feature = "mpi")]
        if backend::over_mpi() {
            let on_rank = |ctx| self.on(vec![ctx], &f).map(|mut results| results.remove(0));
            return processes::run(&self, || self.among_threads(World::threads(self.world), &f), on_rank);
        }
        let world = backend::open(self.world).map_err(|message| self.fail(0, message))?;
        self.among_threads(world, &f)
    }

    /// Runs `f` on the ranks of a world that are threads of this process.
    pub(crate) fn among_threads<T, E, F>(&self, world: World, f: &Arc<F>) -> Result<Vec<T>, WorldError>
    where
        T: Send + 'static,
        E: Display,
        F: Fn(&RankContext) -> Result<T, E> + Send + Sync + 'static,
    {
        // SAFETY: tests run one at a time, and the thread of the test program only waits for them.
        unsafe { threads::settle_among_threads(threads::default_per_rank(self.world)) };
        self.threads().run_in(world, &on_device(f))
    }

    /// Runs `f` on these ranks, each on a thread of its own, and returns their results in this order.
    #[cfg(feature = "mpi")]
    pub(crate) fn on<T, E, F>(&self, ranks: Vec<RankContext>, f: &Arc<F>) -> Result<Vec<T>, WorldError>
    where
        T: Send + 'static,
        E: Display,
        F: Fn(&RankContext) -> Result<T, E> + Send + Sync + 'static,
    {
        self.threads().run_on(ranks, &on_device(f))
    }

    /// Returns the same run among threads.
    fn threads(&self) -> candle_prove::Ranks {
        candle_prove::Ranks::new(self.world, &self.label).deadline(self.deadline).timeout(self.timeout)
    }

    /// Returns an error of a rank, with the label.
    pub(crate) fn fail(&self, rank: usize, message: String) -> WorldError {
        WorldError::new(rank, format!("[{}] {message}", self.label))
    }

    /// Returns the number of ranks.
    #[cfg(feature = "mpi")]
    pub(crate) fn world(&self) -> usize {
        self.world
    }

    /// Returns the label.
    #[cfg(feature = "mpi")]
    pub(crate) fn label(&self) -> &str {
        &self.label
    }

    /// Returns how long a call may wait.
    #[cfg(feature = "mpi")]
    pub(crate) fn longest_call(&self) -> Duration {
        self.timeout
    }

    /// Returns how long the run may take.
    #[cfg(feature = "mpi")]
    pub(crate) fn until_late(&self) -> Duration {
        self.deadline
    }
}

/// What a rank of threads runs.
type OnRank<T> = Box<dyn Fn(&RankContext) -> Result<T, String> + Send + Sync>;

/// Returns what runs `f` while [`device`] is the rank's.
fn on_device<T, E, F>(f: &Arc<F>) -> Arc<OnRank<T>>
where
    E: Display,
    F: Fn(&RankContext) -> Result<T, E> + Send + Sync + 'static,
{
    /// Ends the device before the thread's own memory ends.
    struct End;
    impl Drop for End {
        fn drop(&mut self) {
            DEVICE.set(Device::Cpu);
        }
    }
    let f = f.clone();
    Arc::new(Box::new(move |ctx: &RankContext| {
        let _end = End;
        DEVICE.set(ctx.device().clone());
        f(ctx).map_err(|error| error.to_string())
    }))
}

/// A world of a test whose closure borrows; see [`world`].
#[derive(Debug, Clone, Copy)]
pub struct TestWorld {
    size: usize,
}

/// Returns a world over the backend, each rank on a GPU of its own if there are GPUs. It has no deadline but that of
/// each call; most tests use [`on_ranks`].
///
/// If there are fewer GPUs, the ranks run on the host, and the test is reported as skipped, as by [`skip`](crate::skip).
pub fn world(size: usize) -> TestWorld {
    TestWorld { size }
}

impl TestWorld {
    /// Runs `f` on every rank, as [`World::run`] does.
    ///
    /// # Panics
    /// If the backend is unknown or not in this build.
    pub fn run<T, E, F>(self, f: F) -> Result<Vec<T>, WorldError>
    where
        T: Send + 'static,
        E: Display + Send,
        F: Fn(&RankContext) -> Result<T, E> + Sync,
    {
        #[cfg(feature = "mpi")]
        if backend::over_mpi() {
            let ranks = Ranks::new(self.size, std::thread::current().name().unwrap_or("a test"));
            return processes::run(
                &ranks,
                || World::threads(self.size).run(&f),
                |ctx| processes::on_rank(ctx, &f),
            );
        }
        backend::open(self.size).unwrap_or_else(|why| panic!("{why}")).run(f)
    }
}

/// Runs `f` on `world` ranks and panics with the first failure. Most tests use this.
///
/// # Panics
/// If a rank fails or panics, or if the run takes more than two minutes, five over MPI, or ten over NCCL.
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
