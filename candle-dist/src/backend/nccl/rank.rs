//! The state of one rank: its GPU, its view of the world, and the communicators that its watchdog monitors.
use super::abort::{AbortSet, last_words};
use super::assemblies::AssemblyTable;
use super::comm::{CommMembers, CommState, NcclComm};
use super::ctas::CtaLimits;
use super::handle::{CommTerms, UniqueId};
use super::lanes::LaneSet;
use super::limit::Limit;
use super::parked::ParkedComms;
use super::watch::WorldWatch;
use crate::backend::cuda::driver;
use crate::{Error, Result};
use candle_core::{CudaDevice, Device};
use cudarc::driver::{CudaEvent, CudaStream};
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The interval of the watchdog.
const PATROL: Duration = Duration::from_millis(200);

/// What a rank gets from its world at the start.
pub(crate) struct RankTerms {
    pub(crate) ctas: CtaLimits,
    /// How long an abort may take before the process ends.
    pub(crate) abort_timeout: Duration,
    pub(crate) parked: Arc<ParkedComms>,
    /// Where ranks of this process share a GPU, or GPUs have few queues.
    pub(crate) assemblies: Option<Arc<AssemblyTable>>,
}

/// The state of one rank.
pub(super) struct NcclRank {
    pub(super) watch: WorldWatch,
    pub(super) device: CudaDevice,
    /// The priority of the streams of communicators: the highest. Streams of one priority share few connections to the GPU, where
    /// one that waits holds up those behind it, and kernels of others come before the program's.
    pub(super) priority: i32,
    /// Held by the thread that enqueues a call.
    pub(super) turn: Mutex<()>,
    pub(super) ctas: CtaLimits,
    pub(super) parked: Arc<ParkedComms>,
    pub(super) assemblies: Option<Arc<AssemblyTable>>,
    aborts: Arc<AbortSet>,
    abort_timeout: Duration,
    /// How many messages, and calls that wait for other members, are not enqueued.
    pending: AtomicUsize,
    comms: Mutex<Vec<Weak<CommState>>>,
    /// How many groups of the same members this rank has created.
    groups: Mutex<HashMap<Vec<usize>, u64>>,
    /// The sending ends of the lanes of all groups.
    pub(super) lanes: LaneSet,
}

/// A message or a call that is not enqueued yet, until this is dropped.
pub(super) struct PendingCall(Arc<NcclRank>);

impl PendingCall {
    pub(super) fn new(rank: &Arc<NcclRank>) -> Self {
        rank.pending.fetch_add(1, Ordering::AcqRel);
        Self(rank.clone())
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        self.0.pending.fetch_sub(1, Ordering::AcqRel);
    }
}

/// Returns the key under which ranks share the terms of a communicator.
fn key(name: u64) -> String {
    format!("nccl/{name:016x}")
}

/// Pauses between polls: yields at first, and sleeps after many polls.
#[derive(Default)]
pub(super) struct PollPause(u32);

impl PollPause {
    pub(super) fn pause(&mut self) {
        self.0 += 1;
        match self.0 {
            ..1000 => std::thread::yield_now(),
            _ => std::thread::sleep(Duration::from_micros(200)),
        }
    }
}

impl NcclRank {
    /// Creates the state of the rank on `device`, with its watchdog.
    pub(super) fn new(watch: WorldWatch, device: &Device, terms: RankTerms) -> Result<Arc<Self>> {
        let device = device.as_cuda_device()?.clone();
        device.cuda_stream().context().bind_to_thread().map_err(driver)?;
        let (_, priority) = cudarc::driver::result::stream::get_priority_range().map_err(driver)?;
        let RankTerms { ctas, abort_timeout, parked, assemblies } = terms;
        let rank = Arc::new(Self {
            watch,
            device,
            priority,
            turn: Mutex::default(),
            ctas,
            parked,
            assemblies,
            aborts: Arc::default(),
            abort_timeout,
            pending: AtomicUsize::new(0),
            comms: Mutex::default(),
            groups: Mutex::default(),
            lanes: LaneSet::default(),
        });
        rank.parked.add(Arc::downgrade(&rank));
        let (patrolled, name) = (Arc::downgrade(&rank), format!("nccl watchdog {}", rank.watch.rank()));
        let patrol = move || {
            while let Some(rank) = patrolled.upgrade() {
                rank.patrol();
                drop(rank);
                std::thread::sleep(PATROL);
            }
        };
        let started = std::thread::Builder::new().name(name).spawn(patrol);
        started
            .map_err(|error| Error::Unsupported(format!("no thread for the watchdog of NCCL: {error}")))?;
        Ok(rank)
    }

    /// Returns the GPU's number.
    pub(super) fn gpu(&self) -> usize {
        self.device.cuda_stream().context().ordinal()
    }

    /// Makes the calling thread use this rank's GPU.
    pub(super) fn bind(&self) -> Result<()> {
        self.device.cuda_stream().context().bind_to_thread().map_err(driver)
    }

    /// Returns the id of the next group of `ranks`. The n-th group of the same members has the same id on all members.
    pub(super) fn next_group(&self, ranks: &[usize]) -> u64 {
        let mut groups = self.groups.lock();
        let nth = groups.entry(ranks.to_vec()).or_default();
        *nth += 1;
        crate::control::group_id(ranks, *nth)
    }

    /// Creates a communicator with the members, all of which do so, whose kernels have at most `ctas` thread blocks if this is
    /// the first of them.
    pub(super) fn connect(
        self: &Arc<Self>,
        members: CommMembers<'_>,
        ctas: Option<u32>,
    ) -> Result<Arc<NcclComm>> {
        let terms = match members.me {
            0 => self.announce(members.name, ctas)?,
            _ => self.learn(members.name, members.ranks[0])?,
        };
        self.join(members, terms, Limit::Timeout)
    }

    /// Decides the terms of the communicator `name` and shares them, without waiting for the others.
    pub(super) fn announce(&self, name: u64, ctas: Option<u32>) -> Result<CommTerms> {
        let id = UniqueId::new().map_err(|message| self.watch.fail_with(message))?;
        let terms = CommTerms { id, ctas };
        self.watch.set(&key(name), &terms.to_bytes())?;
        Ok(terms)
    }

    /// Returns the terms of the communicator `name`, which rank `from` of the world decides.
    fn learn(&self, name: u64, from: usize) -> Result<CommTerms> {
        let bytes = self.watch.get(&key(name), from)?;
        let bad =
            || self.watch.fail_with(format!("{} bytes from rank {from}, which are no NCCL id", bytes.len()));
        CommTerms::from_bytes(&bytes).ok_or_else(bad)
    }

    /// Joins a communicator. Returns when all members have joined and know it: a kernel that is enqueued earlier could wait for a
    /// member that still connects, and NCCL's connecting for that kernel (issue 581 of NCCL).
    pub(super) fn join(
        self: &Arc<Self>,
        members: CommMembers<'_>,
        terms: CommTerms,
        limit: Limit,
    ) -> Result<Arc<NcclComm>> {
        let comm = Arc::new(NcclComm::connect(self, members, terms, limit)?);
        self.comms.lock().push(Arc::downgrade(comm.line()));
        self.meet(members)?;
        Ok(comm)
    }

    /// Waits until all members have come here, without the GPU.
    fn meet(&self, CommMembers { name, ranks, me }: CommMembers<'_>) -> Result<()> {
        let here = |member: usize| format!("{}/{member}", key(name));
        if me > 0 {
            self.watch.set(&here(me), &[])?;
            return self.watch.get_late(&here(0)).map(drop);
        }
        // Each of them is connected, and so comes here too. The threads that send outlast their programs.
        (1..ranks.len()).try_for_each(|member| self.watch.get_late(&here(member)).map(drop))?;
        self.watch.set(&here(0), &[])
    }

    /// Waits on the host until the GPU has reached `event`.
    pub(super) fn wait(&self, event: &CudaEvent) -> Result<()> {
        let (began, mut patience) = (Instant::now(), PollPause::default());
        while !event.try_is_complete().map_err(driver)? {
            self.watch.check()?;
            if began.elapsed() >= self.watch.timeout() {
                return Err(self.watch.time_out());
            }
            patience.pause();
        }
        self.watch.check()
    }

    /// Returns whether a message or a call of this rank is not enqueued yet.
    pub(super) fn has_pending(&self) -> bool {
        self.pending.load(Ordering::Acquire) > 0
    }

    /// Makes the stream of the program wait for the end of a call, for which other ranks are needed.
    ///
    /// A stream that waits may hold up others on the GPU, which has few queues for them: also a message that the
    /// other rank needs before it makes the call. So the host waits, as long as a message of this rank is not enqueued.
    pub(super) fn rejoin(&self, stream: &CudaStream, done: &CudaEvent) -> Result<()> {
        let mut patience = PollPause::default();
        while self.has_pending()
            && self.watch.failure().is_none()
            && matches!(done.try_is_complete(), Ok(false))
        {
            patience.pause();
        }
        stream.wait(done).map_err(driver)
    }

    /// Waits on the host until all members have come to the call `round` of a group, as long as a message of this rank is not enqueued:
    /// the end of a call waits at the head of its queue on the GPU.
    pub(super) fn wait_for_members(&self, group: u64, round: u64) -> Result<()> {
        let (began, mut patience) = (Instant::now(), PollPause::default());
        while self.has_pending() && self.watch.is_open(group, round) {
            self.watch.check()?;
            if began.elapsed() >= self.watch.timeout() {
                return Err(self.watch.time_out());
            }
            patience.pause();
        }
        Ok(())
    }

    /// Waits until the calls on all communicators have ended, unless the world fails.
    pub(super) fn settle(&self) {
        let comms: Vec<_> = self.comms.lock().iter().filter_map(Weak::upgrade).collect();
        comms.iter().for_each(|comm| _ = comm.is_settled());
    }

    /// Returns whether no call of this rank is under way.
    pub(super) fn is_idle(&self) -> bool {
        let comms: Vec<_> = self.comms.lock().iter().filter_map(Weak::upgrade).collect();
        comms.iter().all(|comm| comm.is_idle())
    }

    /// Runs the abort of a communicator whose latest call is `call`, on a thread of its own.
    pub(super) fn abort(&self, call: &'static str, abort: impl FnOnce() + Send + 'static) {
        let why =
            self.watch.failure().map_or("it ended early".to_string(), |failure| failure.cause.to_string());
        let words = last_words(self.watch.rank(), self.gpu(), call, self.abort_timeout, &why);
        let context = self.device.cuda_stream().context().clone();
        let abort = move || {
            // NCCL sets the device by itself where it needs it. It must not fail here without one.
            let _ = context.bind_to_thread();
            abort();
        };
        self.aborts.start(self.abort_timeout, abort, move || {
            eprintln!("{words}");
            std::process::abort();
        });
    }

    /// Waits until all aborts have returned. One that does not ends the process.
    pub(super) fn wait_for_aborts(&self) {
        self.aborts.wait(self.abort_timeout);
    }

    fn patrol(&self) {
        let comms: Vec<_> = {
            let mut comms = self.comms.lock();
            comms.retain(|comm| comm.strong_count() > 0);
            comms.iter().filter_map(Weak::upgrade).collect()
        };
        if self.watch.failure().is_none() {
            self.watch.look_for_deserters();
        }
        for comm in comms {
            comm.inspect();
        }
        self.watch.tick();
        self.lanes.tidy();
        self.parked.tidy();
    }
}
