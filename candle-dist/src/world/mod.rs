//! A world of ranks: threads of this process, or processes.
mod context;
mod engines;
mod processes;

pub use context::{RankContext, panic_message};
pub use engines::Backend;
pub use processes::{init_process_group, init_process_group_with};

use crate::backend::local::{LocalBackend, RankGuard, WorldState};
#[cfg(feature = "nccl")]
use crate::backend::nccl::{NcclBackend, Values, Watch, check_devices};
use crate::launch::{InitOptions, LaunchInfo};
use crate::{ProcessGroup, Result, Store, backend, store, threads};
use candle_core::Device;
use std::fmt::Display;
use std::panic::resume_unwind;
use std::sync::Arc;
use std::time::Duration;

/// The stack of a rank's thread: candle walks a graph by recursion, and pages are only touched when needed.
const STACK_BYTES: usize = 256 << 20;

/// The description of a world, and which of its ranks live in this process: all of them as threads, or one.
#[derive(Debug, Clone)]
pub struct World {
    ranks: Ranks,
    timeout: Duration,
    threads_per_rank: Option<usize>,
    devices: Vec<Device>,
    mailbox: Option<usize>,
    wraps: Vec<Wrap>,
}

/// Puts an engine around another one.
#[derive(Clone)]
struct Wrap(Arc<Wrapping>);

/// What makes an engine around an engine.
type Wrapping = dyn Fn(Arc<dyn backend::Backend>) -> Arc<dyn backend::Backend> + Send + Sync;

impl std::fmt::Debug for Wrap {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Wrap")
    }
}

/// The bytes that may lie unread between two ranks of a group, unless the program says otherwise.
const MAILBOX_BYTES: usize = 1 << 30;

/// Where the ranks of a world are.
#[derive(Debug, Clone)]
enum Ranks {
    Threads(usize),
    /// Threads over NCCL, one for each device.
    #[cfg(feature = "nccl")]
    Gpus,
    Processes(Backend, InitOptions),
}

impl World {
    /// A world of `size` ranks, each a thread of this process.
    pub fn local(size: usize) -> Self {
        Self::of(Ranks::Threads(size), Duration::from_secs(600), None)
    }

    fn of(ranks: Ranks, timeout: Duration, threads_per_rank: Option<usize>) -> Self {
        Self { ranks, timeout, threads_per_rank, devices: Vec::new(), mailbox: None, wraps: Vec::new() }
    }

    /// A world whose ranks are threads with a GPU each, over NCCL: one rank for each of `devices`.
    ///
    /// Several ranks on one GPU need `NCCL_MULTI_RANK_GPU_ENABLE=1` and NCCL 2.30 or later, a `Device` each, and code that
    /// has run on each of them before: CUDA may wait for the ranks' calls to load it. Or take [`local`](Self::local).
    ///
    /// # Errors
    /// When the ranks start: devices that are no GPUs or the same twice, and an NCCL library that is too old.
    #[cfg(feature = "nccl")]
    pub fn nccl(devices: Vec<Device>) -> Self {
        Self { ranks: Ranks::Gpus, ..Self::local(devices.len()).devices(&devices) }
    }

    /// A world of processes of which this is one; see [`init_process_group`](crate::init_process_group).
    ///
    /// [`run`](Self::run) calls its closure once, as this process's rank, and returns one result.
    pub fn processes(backend: Backend, options: InitOptions) -> Self {
        let (timeout, threads_per_rank) = (options.timeout, options.threads_per_rank);
        Self::of(Ranks::Processes(backend, options), timeout, threads_per_rank)
    }

    /// The world of processes that torchrun, mpirun or srun has started, over the best engine of this build.
    pub fn from_env() -> Self {
        Self::processes(Backend::Auto, InitOptions::new())
    }

    /// The devices that ranks which are threads find in [`RankContext::device`], in turn; otherwise the host.
    ///
    /// Ranks that share a GPU share its `Device`, which must have a stream of its own: make it with
    /// [`Device::new_cuda_with_stream`]. What one rank computes is then there for all others, in the order in which they
    /// asked; tensors on any other `Device` of the GPU are refused by all ranks.
    ///
    /// ```
    /// use candle_core::Device;
    /// use candle_dist::{ReduceOp, World};
    ///
    /// let gpu = match candle_core::utils::cuda_is_available() {
    ///     true => Device::new_cuda_with_stream(0)?,
    ///     false => Device::Cpu,
    /// };
    /// World::local(2).devices(&[gpu]).run(|ctx| -> candle_dist::Result<()> {
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

    /// How long a rank may wait in one call before the world counts as failed; ten minutes by default.
    ///
    /// Ranks that panicked, returned, or wait for each other are noticed at once, without this.
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// How many threads a rank computes with; by default the cores divided by the ranks.
    ///
    /// candle settles this once for a process, so the first world decides (see [`threads`]).
    pub fn threads_per_rank(mut self, threads: usize) -> Self {
        self.threads_per_rank = Some(threads);
        self
    }

    /// How many bytes of messages may lie unread between two ranks of a group that are threads; 1 GiB by default.
    ///
    /// A send that would exceed it waits until the receiver has read enough, with the deadline of every call; if the
    /// receiver cannot read because it waits too, that is a deadlock, and said so. One message may always be unread, of
    /// whatever size. [`send_start`](ProcessGroup::send_start) and [`batch_send_recv`](ProcessGroup::batch_send_recv) send
    /// without waiting.
    ///
    /// # Errors
    /// When the ranks start, for ranks that are processes or have a GPU each: what is unread there lies with their engine.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    ///
    /// // A sender that is faster than its receiver is at most two messages ahead.
    /// World::local(2).mailbox_bytes(8000).run(|ctx| -> candle_dist::Result<()> {
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

    /// Puts an engine around that of each rank, for all groups of the world: to count, delay or break communication, or
    /// to replace it; see [`Wrapping`](backend::Wrapping) for an example.
    ///
    /// Called once for each rank of this process. The last of several is the outermost.
    pub fn wrap_backend(
        mut self,
        wrap: impl Fn(Arc<dyn backend::Backend>) -> Arc<dyn backend::Backend> + Send + Sync + 'static,
    ) -> Self {
        self.wraps.push(Wrap(Arc::new(wrap)));
        self
    }

    /// Refuses a bound on unread messages, which lie with the engine of these ranks.
    fn refuse_mailbox(&self, ranks: &str) -> Result<()> {
        if self.mailbox.is_none() {
            return Ok(());
        }
        let fix = "World::mailbox_bytes is for threads that read each other's tensors; leave it out";
        Err(crate::Error::Unsupported(format!("a bound on unread messages between {ranks}; {fix}")))
    }

    /// The contexts of the ranks of this process, to be moved to threads of your own; most programs want
    /// [`run`](Self::run).
    pub fn into_ranks(self) -> Result<Vec<RankContext>> {
        let size = match self.ranks {
            Ranks::Threads(size) => size,
            #[cfg(feature = "nccl")]
            Ranks::Gpus => {
                self.refuse_mailbox("GPUs")?;
                self.devices.len()
            }
            Ranks::Processes(backend, ref options) => {
                let options = options.clone();
                self.refuse_mailbox("processes")?;
                let options = InitOptions { threads_per_rank: self.threads_per_rank, ..options.timeout(self.timeout) };
                let ctx = init_process_group(backend, options)?;
                return Ok(vec![ctx.map_engine(|engine| wrapped(engine, &self.wraps))]);
            }
        };
        if size == 0 {
            return Err(crate::Error::Unsupported("a world of 0 ranks; use at least 1".to_string()));
        }
        threads::settle(self.threads_per_rank.unwrap_or_else(|| threads::default_per_rank(size)));
        let world = WorldState::new(size, self.timeout, self.mailbox.unwrap_or(MAILBOX_BYTES));
        let engines = match self.ranks {
            #[cfg(feature = "nccl")]
            Ranks::Gpus => over_nccl(&world, &self.devices)?,
            _ => locally(&world, &self.devices),
        };
        let shared = store::Shared::new(&world);
        let context = |(rank, engine)| {
            let group = ProcessGroup::new(wrapped(engine, &self.wraps));
            let store = Store::of_thread(rank, shared.clone());
            RankContext::of_thread(RankGuard::new(world.clone(), rank), group, store)
        };
        Ok(engines.into_iter().enumerate().map(context).collect())
    }

    /// The first rank that lives in this process, as far as that is known before it meets the others.
    fn first_rank(&self) -> usize {
        match &self.ranks {
            Ranks::Processes(_, options) => LaunchInfo::from_env(options).map_or(0, |info| info.rank),
            _ => 0,
        }
    }

    /// Runs `f` once for each rank of this process, on a thread of its own, and returns the results in rank order.
    ///
    /// If a rank fails or panics, every rank that communicates gets an error, and the error returned here names the
    /// rank that is to blame.
    pub fn run<T, E, F>(self, f: F) -> Result<Vec<T>, WorldError>
    where
        T: Send,
        E: Display + Send,
        F: Fn(&RankContext) -> Result<T, E> + Sync,
    {
        let first = self.first_rank();
        let ranks = self.into_ranks().map_err(|error| WorldError { rank: first, message: error.to_string() })?;
        let failed = std::sync::Mutex::new(None::<WorldError>);
        let blame = |rank: usize, message: &str| {
            let mut failed = failed.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
            failed.get_or_insert_with(|| WorldError { rank, message: message.to_string() });
        };
        let results = std::thread::scope(|scope| {
            let handles: Vec<_> = ranks
                .into_iter()
                .map(|ctx| {
                    let (f, blame) = (&f, &blame);
                    std::thread::Builder::new()
                        .name(format!("rank {}", ctx.rank()))
                        .stack_size(STACK_BYTES)
                        .spawn_scoped(scope, move || ctx.run(f, blame))
                })
                .collect();
            handles
                .into_iter()
                .map(|handle| handle.ok()?.join().unwrap_or_else(|panic| resume_unwind(panic)))
                .collect::<Option<Vec<T>>>()
        });
        match (results, failed.into_inner().unwrap_or_else(std::sync::PoisonError::into_inner)) {
            (Some(results), None) => Ok(results),
            (_, Some(error)) => Err(error),
            (None, None) => Err(WorldError { rank: first, message: "a thread for a rank could not be started".into() }),
        }
    }
}

/// The engine with all that goes around it.
fn wrapped(engine: Arc<dyn backend::Backend>, wraps: &[Wrap]) -> Arc<dyn backend::Backend> {
    wraps.iter().fold(engine, |engine, wrap| wrap.0(engine))
}

/// The engines of threads that read each other's tensors.
fn locally(world: &Arc<WorldState>, devices: &[Device]) -> Vec<Arc<dyn backend::Backend>> {
    let device = |rank: usize| match devices {
        [] => Device::Cpu,
        devices => devices[rank % devices.len()].clone(),
    };
    (0..world.size()).map(|rank| Arc::new(LocalBackend::world(world, rank, device(rank))) as Arc<_>).collect()
}

/// The engines of threads with a GPU each.
#[cfg(feature = "nccl")]
fn over_nccl(world: &Arc<WorldState>, devices: &[Device]) -> Result<Vec<Arc<dyn backend::Backend>>> {
    check_devices(devices)?;
    let values = Arc::new(Values::default());
    let watch = |rank| Watch::Thread { world: world.clone(), values: values.clone(), rank };
    let engine = |(rank, device)| Ok(Arc::new(NcclBackend::world(watch(rank), device, devices.len())?) as Arc<_>);
    devices.iter().enumerate().map(engine).collect()
}

/// The first failure of a [`World::run`].
#[derive(Debug, Clone, thiserror::Error)]
#[error("rank {rank}: {message}")]
pub struct WorldError {
    /// The rank that failed, panicked, returned too early or made another call; otherwise the first that reported.
    pub rank: usize,
    /// What it reported.
    pub message: String,
}
