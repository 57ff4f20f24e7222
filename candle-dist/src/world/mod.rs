//! A world of ranks: threads of this process, or processes.
mod backends;
mod context;
mod processes;

#[allow(deprecated)]
pub use backends::Backend;
pub use backends::BackendKind;
pub use context::{RankContext, panic_message};
pub use processes::{init_process_group, init_process_group_with};

#[cfg(feature = "nccl")]
use crate::backend::nccl::{
    AssemblyTable, CallTable, CtaLimits, NcclBackend, ParkedComms, RankTerms, ReceivePosts, ThreadValues,
    WorldWatch, check_devices, open_pools,
};
use crate::backend::threads::{RankGuard, ThreadBackend, WorldState};
use crate::launch::{GpuOptions, InitOptions, LaunchInfo};
use crate::switch::Switches;
use crate::{ProcessGroup, Result, Store, backend, store, threads};
use candle_core::Device;
use itertools::Itertools;
use std::fmt::Display;
use std::panic::resume_unwind;
use std::sync::{Arc, mpsc};
use std::thread::{Scope, ScopedJoinHandle};
use std::time::Duration;

/// The most ranks that are threads: each has a list of all.
const MOST_THREADS: usize = 1 << 12;
/// The stack size of a rank's thread. candle walks graphs recursively, and unused pages take no memory.
const STACK_BYTES: usize = 256 << 20;

/// A description of a world. Its ranks are threads of this process, or this process is one of them.
#[derive(Debug, Clone)]
pub struct World {
    ranks: WorldRanks,
    timeout: Duration,
    threads_per_rank: Option<usize>,
    devices: Vec<Device>,
    mailbox: Option<usize>,
    gpu: GpuOptions,
    wraps: Vec<Wrap>,
}

/// A function that wraps a backend.
#[derive(Clone)]
struct Wrap(Arc<WrapFn>);

/// Returns a backend that wraps the given one.
type WrapFn = dyn Fn(Arc<dyn backend::Backend>) -> Arc<dyn backend::Backend> + Send + Sync;

impl std::fmt::Debug for Wrap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Wrap")
    }
}

/// The default limit of unread bytes between two ranks of a group.
const MAILBOX_BYTES: usize = 1 << 30;

/// What the ranks of a world are.
#[derive(Debug, Clone)]
enum WorldRanks {
    Threads(usize),
    /// Threads over NCCL, one per device.
    #[cfg(feature = "nccl")]
    Gpus,
    Processes(BackendKind, Box<InitOptions>),
}

impl World {
    /// Creates a world of `size` ranks, each a thread of this process.
    pub fn threads(size: usize) -> Self {
        Self::of(WorldRanks::Threads(size), Duration::from_secs(600), None)
    }

    /// [`threads`](Self::threads) under its former name.
    #[deprecated(since = "0.1.0", note = "renamed to `World::threads`")]
    pub fn local(size: usize) -> Self {
        Self::threads(size)
    }

    fn of(ranks: WorldRanks, timeout: Duration, threads_per_rank: Option<usize>) -> Self {
        let (devices, wraps, gpu) = (Vec::new(), Vec::new(), GpuOptions::default());
        Self { ranks, timeout, threads_per_rank, devices, mailbox: None, gpu, wraps }
    }

    /// Creates a world of threads over NCCL, one rank per device.
    ///
    /// Several ranks on one GPU need `NCCL_MULTI_RANK_GPU_ENABLE=1`, NCCL 2.30 or later, and one `Device` each. They share its few
    /// queues, so the host waits in each call until all members have come to it: such worlds are to try programs. Set
    /// `CUDA_MODULE_LOADING=EAGER`, or CUDA may load a kernel of NCCL's in a call, and wait for the calls of other ranks there. Alternatively,
    /// use [`threads`](Self::threads).
    ///
    /// Call [`threads::settle`](crate::threads::settle) first in `main`, before the devices are made: CUDA reads how many queues it shall
    /// have then, and NCCL when it connects. Ranks of one process may wait for each other in CUDA itself, wherever it waits
    /// for all work of a GPU and of those that are linked with it: in a new group's first call, or when a kernel is loaded. Processes do not.
    ///
    /// # Errors
    /// When the ranks start: if a device is not a GPU or occurs twice, or if the NCCL library is too old.
    #[cfg(feature = "nccl")]
    pub fn nccl(devices: Vec<Device>) -> Self {
        Self { ranks: WorldRanks::Gpus, ..Self::threads(devices.len()).devices(&devices) }
    }

    /// Creates a world of processes, with this process as one rank; see
    /// [`init_process_group`](crate::init_process_group).
    ///
    /// [`run`](Self::run) calls its closure once, for the rank of this process, and returns one result when all ranks have
    /// ended. It is an error if the world stops until then.
    pub fn processes(backend: BackendKind, options: InitOptions) -> Self {
        let (timeout, threads_per_rank, gpu) = (options.timeout, options.threads_per_rank, options.gpu);
        let ranks = WorldRanks::Processes(backend, Box::new(options));
        Self { gpu, ..Self::of(ranks, timeout, threads_per_rank) }
    }

    /// Creates the world of the processes that torchrun, mpirun or srun started, over the best backend of this build.
    pub fn from_env() -> Self {
        Self::processes(BackendKind::Auto, InitOptions::new())
    }

    /// Sets the devices of ranks that are threads, in turn; see [`RankContext::device`]. The default is the CPU.
    ///
    /// Ranks that share a GPU share its `Device`, which must have its own stream: create it with
    /// [`Device::new_cuda_with_stream`]. The stream orders the ranks' work, so every rank sees the results of the
    /// others. All ranks reject tensors on any other `Device` of the GPU.
    ///
    /// ```
    /// use candle_core::Device;
    /// use candle_dist::{ReduceOp, World};
    ///
    /// let gpu = match candle_core::utils::cuda_is_available() {
    ///     true => Device::new_cuda_with_stream(0)?,
    ///     false => Device::Cpu,
    /// };
    /// World::threads(2).devices(&[gpu]).run(|ctx| -> candle_dist::Result<()> {
    ///     let ones = candle_core::Tensor::ones(3, candle_core::DType::F32, ctx.device())?;
    ///     assert_eq!(ctx.group().all_reduce(&ones, ReduceOp::Sum)?.to_vec1::<f32>()?, [2.0; 3]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn devices(mut self, devices: &[Device]) -> Self {
        self.devices = devices.to_vec();
        self
    }

    /// Sets how long a rank may wait in one call before the world fails; ten minutes by default.
    ///
    /// A rank that panics or returns, and ranks that wait for each other, are noticed within half a second, without the
    /// timeout.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// Sets the number of compute threads per rank; by default the cores divided by the ranks.
    ///
    /// candle sets this once per process, so the first world decides (see [`threads`]).
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = Some(threads);
        self
    }

    /// Sets how many bytes may be unread between two ranks of a group that are threads; 1 GiB by default.
    ///
    /// A send that would exceed the limit waits until the receiver has read enough, at most until the timeout of the
    /// call. If the receiver waits too, this is a deadlock and fails as such. One message of any size may always be
    /// unread. [Started](crate::CollectiveCall::start_all) sends and [`batch_send_recv`](ProcessGroup::batch_send_recv) send
    /// without waiting.
    ///
    /// # Errors
    /// When the ranks start, if ranks are processes or have a GPU each: there the backend buffers unread messages.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    ///
    /// // A sender that is faster than its receiver is at most two messages ahead.
    /// World::threads(2).mailbox_bytes(8000).run(|ctx| -> candle_dist::Result<()> {
    ///     for _ in 0..100 {
    ///         match ctx.rank() {
    ///             0 => ctx.group().send(&Tensor::zeros(1000, DType::F32, &Device::Cpu)?, 1)?,
    ///             _ => drop(ctx.group().recv(1000, DType::F32, 0)?),
    ///         }
    ///     }
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    pub fn mailbox_bytes(mut self, bytes: usize) -> Self {
        self.mailbox = Some(bytes);
        self
    }

    /// Sets the most thread blocks (CTAs) of a kernel of NCCL, 1 to 64, for all groups.
    ///
    /// Each takes a multiprocessor of the GPU while it waits for other ranks. By default NCCL decides, and where ranks share a GPU
    /// they have 16 together for each group; messages have 2 at most. `NCCL_MAX_CTAS` in the environment overrides all of them. Other
    /// backends ignore it.
    ///
    /// # Errors
    /// When the ranks start: if NCCL does not take the number.
    pub fn max_ctas(mut self, most: u32) -> Self {
        self.gpu.max_ctas = Some(most);
        self
    }

    /// Sets how long NCCL may take to abort the calls of a GPU after the world has failed; one minute by default.
    ///
    /// If a kernel or a call of the driver hangs, nothing else ends the wait of a rank. So the process then says on stderr which rank and
    /// call it was, and ends. [`Duration::MAX`] lets it wait.
    pub fn abort_timeout(mut self, timeout: Duration) -> Self {
        self.gpu.abort_timeout = timeout;
        self
    }

    /// Wraps the backend of each rank, for all groups of the world: to count, delay or break communication, or to
    /// replace it. See [`BackendWrapper`](backend::BackendWrapper) for an example.
    ///
    /// Calls `wrap` once per rank of this process. If there are several wrappers, the last one is the outermost.
    pub fn wrap_backend(
        mut self,
        wrap: impl Fn(Arc<dyn backend::Backend>) -> Arc<dyn backend::Backend> + Send + Sync + 'static,
    ) -> Self {
        self.wraps.push(Wrap(Arc::new(wrap)));
        self
    }

    /// Refuses a limit on unread messages, because the backend of these ranks buffers them.
    fn refuse_mailbox(&self, ranks: &str) -> Result<()> {
        if self.mailbox.is_none() {
            return Ok(());
        }
        let fix = "World::mailbox_bytes works only for ranks that are threads without NCCL; leave it out";
        Err(crate::Error::Unsupported(format!("a limit on unread messages between {ranks}; {fix}")))
    }

    /// Returns the contexts of the ranks of this process, to be moved to threads of your own. Most programs use
    /// [`run`](Self::run).
    pub fn into_ranks(self) -> Result<Vec<RankContext>> {
        let size = match self.ranks {
            WorldRanks::Threads(size) => size,
            #[cfg(feature = "nccl")]
            WorldRanks::Gpus => {
                self.refuse_mailbox("GPUs")?;
                self.devices.len()
            }
            WorldRanks::Processes(backend, ref options) => {
                let options = (**options).clone();
                self.refuse_mailbox("processes")?;
                let options = InitOptions {
                    threads_per_rank: self.threads_per_rank,
                    gpu: self.gpu,
                    ..options.timeout(self.timeout)
                };
                let ctx = init_process_group(backend, options)?;
                return Ok(vec![ctx.map_backend(|backend| wrapped(backend, &self.wraps))]);
            }
        };
        if !(1..=MOST_THREADS).contains(&size) {
            return Err(crate::Error::Unsupported(format!(
                "a world of {size} ranks; use 1 to {MOST_THREADS} threads"
            )));
        }
        threads::check(self.threads_per_rank).map_err(crate::Error::Init)?;
        threads::settle(self.threads_per_rank.unwrap_or_else(|| threads::default_per_rank(size)));
        let world = WorldState::new(size, self.timeout, self.mailbox.unwrap_or(MAILBOX_BYTES));
        let backends = match self.ranks {
            #[cfg(feature = "nccl")]
            WorldRanks::Gpus => over_nccl(&world, &self.devices, self.gpu)?,
            _ => locally(&world, &self.devices)?,
        };
        let shared = store::SharedValues::new(&world);
        let context = |(rank, backend)| {
            let group =
                ProcessGroup::new(wrapped(backend, &self.wraps)).with_switches(Switches::of_process());
            let store = Store::of_thread(rank, shared.clone());
            RankContext::of_thread(RankGuard::new(world.clone(), rank), group, store)
        };
        Ok(backends.into_iter().enumerate().map(context).collect())
    }

    /// Returns the first rank of this process, as far as it is known before the processes meet.
    fn first_rank(&self) -> usize {
        match &self.ranks {
            WorldRanks::Processes(_, options) => LaunchInfo::from_env(options).map_or(0, |info| info.rank),
            _ => 0,
        }
    }

    /// Runs `f` once per rank of this process, on its own thread, and returns the results in rank order.
    ///
    /// If a rank fails or panics, every rank that communicates gets an error. The error returned here names the rank
    /// that caused the failure, or all ranks if each of them returned the same error. An error of anyhow is shown with its causes.
    pub fn run<T, E, F>(self, f: F) -> Result<Vec<T>, WorldError>
    where
        T: Send,
        E: Display + Send,
        F: Fn(&RankContext) -> Result<T, E> + Sync,
    {
        let first = self.first_rank();
        let mut ranks = self.into_ranks().map_err(|error| WorldError::at_start(first, &error))?;
        let size = ranks.len();
        let failed = std::sync::Mutex::new(Vec::new());
        let blame = |culprit: usize, message: &str| {
            let mut failed = failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            failed.push(WorldError::new(culprit, message));
        };
        let run = |come: mpsc::Receiver<RankContext>| come.recv().ok()?.run(&f, blame);
        let results = std::thread::scope(|scope| {
            let mut threads = Vec::with_capacity(ranks.len());
            for at in 0..ranks.len() {
                match start(scope, &ranks[at], &run) {
                    Ok(thread) => threads.push(thread),
                    Err(reason) => {
                        // The threads before it end without a rank. Other processes hear of the reason.
                        drop(threads);
                        ranks.swap_remove(at).run(|_| Err::<T, _>(reason.as_str()), blame);
                        return None;
                    }
                }
            }
            let running: Vec<_> = ranks
                .into_iter()
                .zip(threads)
                .map(|(ctx, (rank, thread))| {
                    // It cannot fail, because the thread waits for its rank.
                    let _ = rank.send(ctx);
                    thread
                })
                .collect();
            running
                .into_iter()
                .map(|thread| thread.join().unwrap_or_else(|panic| resume_unwind(panic)))
                .collect::<Option<Vec<T>>>()
        });
        let failed = failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner);
        match (results, WorldError::of(failed, size)) {
            (Some(results), None) => Ok(results),
            (_, Some(error)) => Err(error),
            (None, None) => Err(WorldError::new(first, "a rank ended without a result")),
        }
    }
}

/// A thread that waits for its rank, and runs it.
type Thread<'scope, T> = (mpsc::Sender<RankContext>, ScopedJoinHandle<'scope, Option<T>>);

/// Starts the thread of a rank, which gets the rank when all threads are there: a rank whose thread is missing must not look
/// like one that has returned. The error is the reason why it does not start.
fn start<'scope, T: Send + 'scope>(
    scope: &'scope Scope<'scope, '_>,
    rank: &RankContext,
    run: &'scope (impl Fn(mpsc::Receiver<RankContext>) -> Option<T> + Sync),
) -> Result<Thread<'scope, T>, String> {
    let (sender, come) = mpsc::channel();
    let thread = std::thread::Builder::new().name(format!("rank {}", rank.rank())).stack_size(STACK_BYTES);
    let started = thread.spawn_scoped(scope, move || run(come)).map_err(|error| {
        let fix = "start fewer ranks, or raise the limit on threads (ulimit -u, pids.max of the cgroup) or on memory";
        format!("the thread of rank {} of {} does not start: {error}; {fix}", rank.rank(), rank.world_size())
    });
    Ok((sender, started?))
}

/// Applies all wrappers to a backend.
fn wrapped(backend: Arc<dyn backend::Backend>, wraps: &[Wrap]) -> Arc<dyn backend::Backend> {
    wraps.iter().fold(backend, |backend, wrap| wrap.0(backend))
}

/// Creates the backends of threads that read each other's tensors.
fn locally(world: &Arc<WorldState>, devices: &[Device]) -> Result<Vec<Arc<dyn backend::Backend>>> {
    #[cfg(feature = "cuda")]
    backend::cuda::keep_freed_memory(devices)?;
    let device = |rank: usize| match devices {
        [] => Device::Cpu,
        devices => devices[rank % devices.len()].clone(),
    };
    let backend = |rank| Arc::new(ThreadBackend::world(world, rank, device(rank))) as Arc<_>;
    Ok((0..world.size()).map(backend).collect())
}

/// Creates the backends of threads with a GPU each.
#[cfg(feature = "nccl")]
fn over_nccl(
    world: &Arc<WorldState>,
    devices: &[Device],
    gpu: GpuOptions,
) -> Result<Vec<Arc<dyn backend::Backend>>> {
    check_devices(devices)?;
    open_pools(devices)?;
    threads::note_gpu_variables();
    let most_on_one = devices.iter().map(|device| format!("{:?}", device.location())).counts();
    let most_on_one = most_on_one.into_values().max().unwrap_or(1);
    let ctas = CtaLimits::new(gpu.max_ctas, most_on_one)?;
    let is_shared = most_on_one > 1;
    let assemblies = (is_shared || threads::has_few_queues()).then(|| AssemblyTable::new(is_shared));
    let (values, calls) = (Arc::new(ThreadValues::default()), Arc::new(CallTable::default()));
    let (posts, parked) = (Arc::new(ReceivePosts::default()), ParkedComms::new(devices.len()));
    let backend = |(rank, device)| {
        let (world, values) = (world.clone(), values.clone());
        let watch = WorldWatch::Thread { world, values, calls: calls.clone(), posts: posts.clone(), rank };
        let (parked, assemblies) = (parked.clone(), assemblies.clone());
        let terms = RankTerms { ctas, abort_timeout: gpu.abort_timeout, parked, assemblies };
        Ok(Arc::new(NcclBackend::world(watch, device, devices.len(), terms)?) as Arc<_>)
    };
    devices.iter().enumerate().map(backend).collect()
}

/// The first failure of a [`World::run`].
#[derive(Debug, Clone, thiserror::Error)]
#[error("{}: {}", shown(*rank, *common_to), crate::printable(message))]
#[non_exhaustive]
pub struct WorldError {
    /// The rank that failed, panicked, returned too early or made a different call; otherwise the first that reported.
    pub rank: usize,
    /// The message that it reported.
    pub message: String,
    /// The number of ranks, if there are several and each of them has failed with this message.
    pub common_to: Option<usize>,
}

/// Returns the subject of the message of an error: a rank, or all of them.
fn shown(rank: usize, common_to: Option<usize>) -> String {
    match common_to {
        Some(2) => "both ranks".to_string(),
        Some(ranks) => format!("all {ranks} ranks"),
        None => format!("rank {rank}"),
    }
}

impl WorldError {
    /// Creates the error of one rank.
    pub fn new(rank: usize, message: impl Into<String>) -> Self {
        Self { rank, message: message.into(), common_to: None }
    }

    /// Returns the first failure of the `size` ranks of this process. Each rank has one at most.
    fn of(failed: Vec<Self>, size: usize) -> Option<Self> {
        let is_common =
            size > 1 && failed.len() == size && failed.iter().map(|error| &error.message).all_equal();
        let first = failed.into_iter().next()?;
        Some(Self { common_to: is_common.then_some(size), ..first })
    }

    /// Returns the error of a start that failed on `rank`, maybe because another rank stopped the world meanwhile.
    fn at_start(rank: usize, error: &crate::Error) -> Self {
        let culprit = match error {
            crate::Error::Group(failure) => failure.cause.culprit(),
            _ => None,
        };
        Self::new(culprit.unwrap_or(rank), error.to_string())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Cause, Error, GroupFailure};

    #[test]
    fn an_error_of_all_ranks_says_so_and_one_of_anyhow_keeps_its_causes() {
        let wide = |_: &RankContext| Err::<(), _>(Error::Mesh("too wide".into()));
        let error = World::threads(3).run(wide).unwrap_err();
        assert_eq!(
            (error.common_to, error.to_string().as_str()),
            (Some(3), "all 3 ranks: device mesh: too wide")
        );
        let mine = |ctx: &RankContext| Err::<(), _>(ctx.rank().to_string());
        assert_eq!(World::threads(2).run(mine).unwrap_err().common_to, None);
        // All ranks get the failure that one has caused.
        let error = World::threads(2)
            .run(|ctx| if ctx.rank() == 0 { ctx.group().barrier() } else { Ok(()) })
            .unwrap_err();
        assert_eq!((error.common_to, error.rank), (None, 1));
        struct Chain;
        impl std::fmt::Display for Chain {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(if f.alternate() { "no batch: no such file" } else { "no batch" })
            }
        }
        let error = World::threads(1).run(|_| Err::<(), _>(Chain)).unwrap_err();
        assert_eq!(error.to_string(), "rank 0: no batch: no such file");
    }

    /// A rank may be late enough to hear of the failure of another one while it starts.
    #[test]
    fn a_start_that_another_rank_stopped_names_that_rank() {
        let stopped = |cause| Error::Group(Arc::new(GroupFailure { cause, ranks: Vec::new() }));
        assert_eq!(WorldError::at_start(4, &stopped(Cause::Returned { rank: 7 })).rank, 7);
        assert_eq!(WorldError::at_start(4, &stopped(Cause::Deadlock)).rank, 4);
        assert_eq!(WorldError::at_start(4, &Error::Unsupported("no backend here".into())).rank, 4);
    }
}
