//! How the members of a communicator find each other.
use super::exchange::{Exchange, Head, Key, Topic};
use super::{Comm, Comms, Shared, State};
use crate::engine::HardwareQueue;
use crate::settings;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

/// What the init of a member says of its communicator.
pub(super) struct InitConfig {
    pub(super) blocking: bool,
    /// For how many polls the init is still in progress when all members are there.
    pub(super) polls: u64,
    pub(super) max_ctas: usize,
    pub(super) connects_in_calls: bool,
    pub(super) multi_rank: bool,
    pub(super) queue: HardwareQueue,
}

/// The size of `ncclUniqueId`.
pub(super) const ID_BYTES: usize = 128;

/// Returns an id that no other call of any process returns.
pub(super) fn unique_id() -> [u8; ID_BYTES] {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    let mut id = [0; ID_BYTES];
    id[..4].copy_from_slice(&std::process::id().to_le_bytes());
    id[4..8].copy_from_slice(&(NEXT.fetch_add(1, Ordering::Relaxed) as u32).to_le_bytes());
    id
}

fn key(comm: &Shared, rank: usize) -> Key {
    Key { comm: comm.id, topic: Topic::Join, number: 0, ends: [rank; 2] }
}

pub(super) fn all_are_there(exchange: &Exchange, comm: &Shared) -> bool {
    (0..comm.size).all(|rank| exchange.has(key(comm, rank)))
}

/// Returns why NCCL refuses the communicator: two members on one GPU (NCCL 2.30, `NCCL_MULTI_RANK_GPU_ENABLE`).
pub(super) fn refusal(exchange: &Exchange, comm: &Comm) -> Option<String> {
    (!comm.multi_rank && repeats(&gpus(exchange, &comm.shared))).then(|| {
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this \
         configuration."
            .to_string()
    })
}

/// Returns whether a value occurs twice.
fn repeats(values: &[u64]) -> bool {
    values.iter().enumerate().any(|(at, value)| values[..at].contains(value))
}

/// Returns the GPUs of the members.
fn gpus(exchange: &Exchange, comm: &Shared) -> Vec<u64> {
    (0..comm.size).filter_map(|rank| Some(exchange.get(key(comm, rank))?.numbers[0])).collect()
}

/// Returns the most CTAs of a kernel without a bound: `MAXCHANNELS` where members share a GPU ("two ranks per GPU" are possible then,
/// `NCCL_MULTI_RANK_GPU_ENABLE`), and what NCCL 2.30 makes of the links of an H100 otherwise. One member launches no kernel
/// (`ncclLaunchOneRank`).
pub(super) fn ctas(exchange: &Exchange, comm: &Shared) -> usize {
    match comm.size {
        1 => 0,
        _ if repeats(&gpus(exchange, comm)) => MAX_CHANNELS,
        _ => 32,
    }
}

/// `MAXCHANNELS` (`device.h`), which `maxCTAs` cannot exceed.
pub(super) const MAX_CHANNELS: usize = 64;

impl Comms {
    /// Adds this rank to the communicator of a unique id. It is ready when all members are there.
    pub(super) fn join(
        &mut self,
        handle: u64,
        id: &[u8; ID_BYTES],
        [rank, size]: [usize; 2],
        device: usize,
        config: InitConfig,
    ) {
        let InitConfig { blocking, polls, max_ctas, connects_in_calls, multi_rank, queue } = config;
        let id = u64::from_le_bytes([id[0], id[1], id[2], id[3], id[4], id[5], id[6], id[7]]);
        let shared =
            Arc::new(Shared { id, rank, size, aborted: AtomicBool::new(false), wrong: OnceLock::new() });
        let head = Head { call: "init", numbers: [device as u64, size as u64, 0, 0], site: String::new() };
        self.exchange.put(key(&shared, rank), head, Vec::new(), (Arc::default(), 0.0));
        if settings::get().folder.is_some() {
            crate::engine::keep_running();
        }
        let comm = Comm {
            shared,
            device,
            blocking,
            state: State::Joining(polls),
            last: None,
            collectives: 0,
            sends: Default::default(),
            receives: Default::default(),
            connected: Default::default(),
            connects_in_calls,
            multi_rank,
            max_ctas,
            ctas: 0,
            queue,
        };
        self.members.entry(id).or_default().devices.push(device);
        self.comms.insert(handle, comm);
    }
}
