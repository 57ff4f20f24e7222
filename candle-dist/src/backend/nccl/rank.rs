//! The state of one rank: its GPU, its view of the world, and the communicators that its watchdog monitors.
use super::comm::{CommState, Limit, NcclComm};
use super::handle::UniqueId;
use super::lanes::LaneSet;
use super::watch::WorldWatch;
use crate::backend::cuda::driver;
use crate::{Error, Result};
use candle_core::{CudaDevice, Device};
use cudarc::driver::CudaEvent;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

/// The interval of the watchdog.
const PATROL: Duration = Duration::from_millis(200);

/// The state of one rank.
pub(super) struct NcclRank {
    pub(super) watch: WorldWatch,
    pub(super) device: CudaDevice,
    comms: Mutex<Vec<Weak<CommState>>>,
    /// How many groups of the same members this rank has created.
    groups: Mutex<HashMap<Vec<usize>, u64>>,
    /// The sending ends of the lanes of all groups.
    pub(super) lanes: LaneSet,
}

/// Returns the key under which ranks share the id of a communicator.
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
    pub(super) fn new(watch: WorldWatch, device: &Device) -> Result<Arc<Self>> {
        let device = device.as_cuda_device()?.clone();
        let rank = Arc::new(Self {
            watch,
            device,
            comms: Mutex::default(),
            groups: Mutex::default(),
            lanes: LaneSet::default(),
        });
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

    /// Creates the communicator `name` of `ranks` (of the world), in which this rank is the `me`-th. All use one name.
    pub(super) fn connect(self: &Arc<Self>, name: u64, ranks: &[usize], me: usize) -> Result<Arc<NcclComm>> {
        let id = if me == 0 { self.announce(name)? } else { self.learn(name, ranks[0])? };
        self.join(id, ranks.len(), me, Limit::Timeout)
    }

    /// Creates the id of the communicator `name` and shares it, without waiting for the others.
    pub(super) fn announce(&self, name: u64) -> Result<UniqueId> {
        let id = UniqueId::new().map_err(|message| self.watch.fail_with(message))?;
        self.watch.set(&key(name), &id.to_bytes())?;
        Ok(id)
    }

    /// Returns the id of the communicator `name`, which rank `from` of the world creates.
    fn learn(&self, name: u64, from: usize) -> Result<UniqueId> {
        let bytes = self.watch.get(&key(name), from)?;
        let bad =
            || self.watch.fail_with(format!("{} bytes from rank {from}, which are no NCCL id", bytes.len()));
        UniqueId::from_bytes(&bytes).ok_or_else(bad)
    }

    /// Joins a communicator of `size` members as the `me`-th. Returns when all have joined.
    pub(super) fn join(
        self: &Arc<Self>,
        id: UniqueId,
        size: usize,
        me: usize,
        limit: Limit,
    ) -> Result<Arc<NcclComm>> {
        let comm = Arc::new(NcclComm::connect(self, id, size, me, limit)?);
        self.comms.lock().push(Arc::downgrade(comm.line()));
        Ok(comm)
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

    /// Waits until the calls on all communicators have ended, unless the world fails.
    pub(super) fn settle(&self) {
        let comms: Vec<_> = self.comms.lock().iter().filter_map(Weak::upgrade).collect();
        comms.iter().for_each(|comm| _ = comm.is_settled());
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
        self.lanes.tidy();
    }
}
