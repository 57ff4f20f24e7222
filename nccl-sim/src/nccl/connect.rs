//! How members of a communicator connect: at the first call that needs it, and inside of the call.
//!
//! Rules: `NCCL_RUNTIME_CONNECT` (User Guide, "Environment Variables"), and NCCL 2.30.7: `ncclPrepareTasks` (`enqueue.cc`) marks the
//! algorithms that a communicator uses for the first time, and `p2pTaskAppend` the peers; `groupLaunch` (`group.cc`) connects them before
//! it launches anything, and `ncclTransportP2pSetup` (`transport.cc`) waits for the peers. The variable is about algorithms alone
//! (`initTransportsRank`, `init.cc`): messages always connect at the first one to a peer.
use super::exchange::{Exchange, Head, Key, Topic};
use super::part::{Call, Part};
use super::{Comm, Shared};
use std::sync::Arc;

/// The most bytes of a call that is small.
const SMALL: usize = 64 << 10;

/// Returns what a member tells of its connections, and what it waits for, before it can make a call.
///
/// Which algorithm a call uses is NCCL's choice by the collective, the size and the machine. Here each collective has two of its own, one
/// for small calls.
fn keys(part: &Part, comm: &Shared) -> (Key, Vec<Key>) {
    let peer = |topic, ends| Key { comm: comm.id, topic, number: 0, ends };
    match part.call {
        Call::Send => {
            let ends = [comm.rank, part.root];
            (peer(Topic::Sender, ends), vec![peer(Topic::Receiver, ends)])
        }
        Call::Recv => {
            let ends = [part.root, comm.rank];
            (peer(Topic::Receiver, ends), vec![peer(Topic::Sender, ends)])
        }
        call => {
            let number = 2 * call as u64 + u64::from(part.len() > SMALL);
            let key = |rank: usize| Key { comm: comm.id, topic: Topic::Algorithm, number, ends: [rank; 2] };
            (key(comm.rank), (0..comm.size).map(key).collect())
        }
    }
}

impl Comm {
    /// Tells the others which connections the calls need that are not there yet. Returns what to wait for.
    pub(super) fn connect(&mut self, parts: &[Part], exchange: &Exchange) -> Vec<Key> {
        let mut waits = Vec::new();
        for part in parts {
            let is_message = matches!(part.call, Call::Send | Call::Recv);
            let is_alone = self.shared.size == 1 || is_message && part.root == self.shared.rank;
            if is_alone || !is_message && !self.connects_in_calls {
                continue;
            }
            let (told, awaited) = keys(part, &self.shared);
            if self.connected.insert(told) {
                let head = Head { call: "connect", ..Head::default() };
                exchange.put(told, head, Vec::new(), (Arc::default(), 0.0));
                waits.extend(awaited);
            }
        }
        waits
    }
}
