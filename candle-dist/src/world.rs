//! A world of ranks in this process.
use crate::backend::Backend;
use crate::backend::local::{LocalBackend, RankGuard, WorldState};
#[cfg(feature = "nccl")]
use crate::backend::nccl::{NcclBackend, Values, Watch, check_devices};
use crate::{Cause, DeviceMesh, ProcessGroup, Result, threads};
use candle_core::Device;
use std::any::Any;
use std::fmt::Display;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::Arc;
use std::time::Duration;

/// The stack of a rank's thread: candle walks a graph by recursion, and pages are only touched when needed.
const STACK_BYTES: usize = 256 << 20;

/// The description of a world whose ranks are threads of this process.
#[derive(Debug, Clone)]
pub struct World {
    size: usize,
    timeout: Duration,
    threads_per_rank: Option<usize>,
    devices: Vec<Device>,
    #[cfg(feature = "nccl")]
    over_nccl: bool,
}

impl World {
    /// A world of `size` ranks, each a thread.
    pub fn local(size: usize) -> Self {
        Self {
            size,
            timeout: Duration::from_secs(600),
            threads_per_rank: None,
            devices: Vec::new(),
            #[cfg(feature = "nccl")]
            over_nccl: false,
        }
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
        Self { over_nccl: true, devices: devices.clone(), ..Self::local(devices.len()) }
    }

    /// The devices that the ranks find in [`RankContext::device`], in turn; otherwise the host.
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

    /// The contexts of all ranks, to be moved to threads of your own; most programs want [`run`](Self::run).
    pub fn into_ranks(self) -> Result<Vec<RankContext>> {
        if self.size == 0 {
            return Err(crate::Error::Unsupported("a world of 0 ranks; use at least 1".to_string()));
        }
        threads::settle(self.threads_per_rank.unwrap_or_else(|| threads::default_per_rank(self.size)));
        let world = WorldState::new(self.size, self.timeout);
        let engines = self.engines(&world)?.into_iter().enumerate();
        let context = |(rank, engine)| RankContext {
            guard: RankGuard::new(world.clone(), rank),
            group: ProcessGroup::new(engine),
        };
        Ok(engines.map(context).collect())
    }

    /// Every rank's engine.
    fn engines(&self, world: &Arc<WorldState>) -> Result<Vec<Arc<dyn Backend>>> {
        #[cfg(feature = "nccl")]
        if self.over_nccl {
            check_devices(&self.devices)?;
            let values = Arc::new(Values::default());
            let watch = |rank| Watch::Thread { world: world.clone(), values: values.clone(), rank };
            let engine = |(rank, device)| Ok(Arc::new(NcclBackend::world(watch(rank), device, self.size)?) as Arc<_>);
            return self.devices.iter().enumerate().map(engine).collect();
        }
        let device = |rank: usize| match &self.devices[..] {
            [] => Device::Cpu,
            devices => devices[rank % devices.len()].clone(),
        };
        Ok((0..self.size).map(|rank| Arc::new(LocalBackend::world(world, rank, device(rank))) as Arc<_>).collect())
    }

    /// Runs `f` once per rank, each on its own thread, and returns the results in rank order.
    ///
    /// If a rank fails or panics, every rank that communicates gets an error, and the error returned here names the
    /// rank that is to blame.
    pub fn run<T, E, F>(self, f: F) -> Result<Vec<T>, WorldError>
    where
        T: Send,
        E: Display + Send,
        F: Fn(&RankContext) -> Result<T, E> + Sync,
    {
        let ranks = self.into_ranks().map_err(|error| WorldError { rank: 0, message: error.to_string() })?;
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
            (None, None) => Err(WorldError { rank: 0, message: "a thread for a rank could not be started".into() }),
        }
    }
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

/// What a rank knows about itself: its rank, its device, and the group of all ranks.
///
/// Dropping it tells the other ranks that this one has ended.
pub struct RankContext {
    /// Dropped first: an engine that ends waits for calls under way, which will not come to an end if this rank failed.
    guard: RankGuard,
    group: ProcessGroup,
}

impl std::fmt::Debug for RankContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RankContext({} of {})", self.rank(), self.world_size())
    }
}

impl RankContext {
    /// This rank in the world.
    pub fn rank(&self) -> usize {
        self.group.rank()
    }

    /// The number of ranks in the world.
    pub fn world_size(&self) -> usize {
        self.group.size()
    }

    /// The device that this rank computes on: the host, unless [`World::devices`] gives it another.
    pub fn device(&self) -> &Device {
        self.group.device()
    }

    /// The group of all ranks.
    pub fn group(&self) -> &ProcessGroup {
        &self.group
    }

    /// A mesh over all ranks; see [`DeviceMesh::new`].
    #[track_caller]
    pub fn mesh(&self, axes: &[(&str, usize)]) -> Result<DeviceMesh> {
        DeviceMesh::new(&self.group, axes)
    }

    /// Runs `f` as this rank and tells the world how it ended; `blame` is told of a failure before the others wake.
    pub fn run<T, E: Display>(mut self, f: impl Fn(&Self) -> Result<T, E>, blame: impl Fn(usize, &str)) -> Option<T> {
        use crate::backend::local::End;
        let rank = self.rank();
        self.guard.settle_thread();
        let (result, end) = match catch_unwind(AssertUnwindSafe(|| f(&self))) {
            Ok(Ok(value)) => (Some(value), End::Returned),
            Ok(Err(error)) => (None, End::Failed(error.to_string())),
            Err(panic) => (None, End::Panicked(panic_message(&*panic))),
        };
        match &end {
            End::Returned => {}
            // The first to notice is not always the one to blame.
            End::Failed(message) => blame(self.culprit().unwrap_or(rank), message),
            End::Panicked(message) => blame(rank, &format!("panicked: {message}")),
        }
        self.guard.finish(end);
        result
    }

    /// The rank whose doing stopped the world, if one did and the failure tells.
    fn culprit(&self) -> Option<usize> {
        match self.group.failure()?.cause {
            Cause::Mismatch { rank, .. } | Cause::Returned { rank } => Some(rank),
            Cause::Failed { rank, .. } | Cause::Panicked { rank, .. } => Some(rank),
            Cause::Deadlock | Cause::TimedOut { .. } => None,
        }
    }
}

/// What a caught panic said.
pub fn panic_message(panic: &(dyn Any + Send)) -> String {
    match (panic.downcast_ref::<&str>(), panic.downcast_ref::<String>()) {
        (Some(text), _) => (*text).to_string(),
        (_, Some(text)) => text.clone(),
        _ => "(a panic without a message)".to_string(),
    }
}
