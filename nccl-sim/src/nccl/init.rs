//! How the members of a communicator find each other.
use super::exchange::{Exchange, Head, Key, Topic};
use super::{Comm, Comms, Shared, State};
use crate::settings;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};

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
pub(super) fn refusal(exchange: &Exchange, comm: &Shared) -> Option<String> {
    if std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|value| value == "1") {
        return None;
    }
    let gpus: Vec<u64> =
        (0..comm.size).filter_map(|rank| Some(exchange.get(key(comm, rank))?.numbers[0])).collect();
    let twice = gpus.iter().enumerate().any(|(at, gpu)| gpus[..at].contains(gpu));
    twice.then(|| {
        "Multiple Ranks are using the same GPU/Partition. Set NCCL_MULTI_RANK_GPU_ENABLE=1 to enable this \
         configuration."
            .to_string()
    })
}

impl Comms {
    /// Adds this rank to the communicator of a unique id. It is ready when all members are there.
    pub(super) fn join(
        &mut self,
        handle: u64,
        id: &[u8; ID_BYTES],
        [rank, size]: [usize; 2],
        device: usize,
        blocking: bool,
        polls: u64,
    ) {
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
        };
        self.comms.insert(handle, comm);
    }
}
