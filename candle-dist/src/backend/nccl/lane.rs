//! A lane for messages to one rank with one tag: a communicator of two, a stream, and a sender thread.
//!
//! NCCL's send ends when the receiver accepts it, and the calls on one communicator run in order. Until then its kernel takes
//! multiprocessors, and streams that wait for it may hold up others: a GPU has few queues for streams. So the sender thread enqueues a
//! message when its receive is enqueued, and until then the streams of the rank wait for no other rank
//! ([`NcclRank::rejoin`]). The earliest of the calls that wait thus always finds its peers in front of the queues.
use super::comm::{CommMembers, NcclComm};
use super::handle::CommTerms;
use super::lanes::{CourierMessage, LaneEnd};
use super::limit::{LaneStatus, Limit, PriorWork};
use super::rank::{NcclRank, PendingCall};
use super::transfer::{DoneEvent, issue_send};
use crate::backend::cuda::driver;
use crate::{Error, Result};
use candle_core::{Device, Tensor};
use std::collections::VecDeque;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::sync::mpsc::{Receiver, RecvTimeoutError, channel};
use std::time::Duration;

/// How soon memory is freed after its message has arrived.
const TIDY: Duration = Duration::from_millis(20);

/// The sending end of a lane.
pub(super) struct LaneSender {
    pub(super) id: u64,
    pub(super) sent: u64,
    end: Arc<LaneEnd>,
}

/// A message that the GPU may still read.
struct LaneMessage {
    tensor: Tensor,
    number: u64,
    arrived: DoneEvent,
}

impl Drop for LaneMessage {
    fn drop(&mut self) {
        // The memory is freed on the tensor's stream, also when the courier stops early: after the send has read it. A
        // drop cannot return errors.
        if let Device::Cuda(device) = self.tensor.device() {
            let _ = device.cuda_stream().wait(&self.arrived);
        }
    }
}

impl LaneSender {
    /// Opens the channel `id` between two ranks of the world, the sender first.
    pub(super) fn open(rank: &Arc<NcclRank>, id: u64, ends: [usize; 2]) -> Result<Self> {
        let (queue, incoming) = channel();
        // Announced here, so that the receiver finds it even if this rank ends soon.
        let terms = rank.announce(id, Some(rank.ctas.lane))?;
        let (owner, rank, name) = (rank, rank.clone(), format!("nccl {} to {}", ends[0], ends[1]));
        let sending = LaneStatus::new(id, ends[1]);
        let (limit, shared) = (Limit::Send(sending.clone()), sending.clone());
        let opening = PendingCall::new(owner);
        let courier = std::thread::Builder::new().name(name).spawn(move || {
            let members = CommMembers { name: id, ranks: &ends, me: 0 };
            let opened = open(&rank, members, terms, limit);
            drop(opening);
            let delivered = opened.and_then(|comm| deliver(&rank, &comm, &incoming));
            // Also after this end was closed: the receiver may wait for the message.
            if let Err(error) = delivered
                && !shared.dropped.load(Ordering::Relaxed)
            {
                rank.watch.fail_with(error.to_string());
            }
            rank.watch.forget_posts(id);
        });
        let courier =
            courier.map_err(|error| Error::Unsupported(format!("no thread for messages: {error}")))?;
        let end = Arc::new(LaneEnd::new(queue, courier, sending));
        owner.lanes.keep(&end)?;
        Ok(Self { id, sent: 0, end })
    }

    /// Hands a tensor on this rank's GPU to the courier thread.
    pub(super) fn push(&mut self, rank: &Arc<NcclRank>, tensor: Tensor) -> Result<()> {
        let Device::Cuda(device) = tensor.device() else {
            return Err(Error::Unsupported("sending a host tensor over NCCL".to_string()));
        };
        // The sender waits for this event on a stream of its own, because this thread may go on with the tensor's stream.
        let ready = device.cuda_stream().record_event(None).map_err(driver)?;
        self.sent += 1;
        if self.end.push(CourierMessage { tensor, ready, unsent: PendingCall::new(rank) }) {
            return Ok(());
        }
        rank.lanes.check()?;
        Err(rank.watch.fail_with("the courier of messages has stopped".to_string()))
    }
}

impl Drop for LaneSender {
    fn drop(&mut self) {
        // Not waited for: a receiver that will not come is known to have left only when it ends, which may wait for this
        // rank. The end of the rank waits.
        self.end.close();
    }
}

/// Opens the sending end of a lane.
fn open(
    rank: &Arc<NcclRank>,
    members: CommMembers<'_>,
    terms: CommTerms,
    limit: Limit,
) -> Result<Arc<NcclComm>> {
    let comm = rank.join(members, terms, limit)?;
    comm.connect_lane(members.me)?;
    Ok(comm)
}

/// Opens the receiving end of the lane `id` between two ranks of the world, the sender first.
pub(super) fn open_receiver(rank: &Arc<NcclRank>, id: u64, ends: [usize; 2]) -> Result<Arc<NcclComm>> {
    let members = CommMembers { name: id, ranks: &ends, me: 1 };
    let comm = rank.connect(members, None)?;
    comm.connect_lane(members.me)?;
    Ok(comm)
}

/// Delivers messages until the queue is closed.
fn deliver(rank: &NcclRank, comm: &NcclComm, incoming: &Receiver<CourierMessage>) -> Result<()> {
    let mut under_way: VecDeque<LaneMessage> = VecDeque::new();
    let mut numbers = 0..;
    loop {
        match incoming.recv_timeout(TIDY) {
            Ok(CourierMessage { tensor, ready, unsent }) => {
                let number = numbers.next().unwrap_or(u64::MAX);
                comm.wait_for_receiver(number)?;
                let sent = issue_send(comm, &PriorWork::of(ready), &tensor, 1);
                drop(unsent);
                comm.note_sent(number);
                // After a failure, what still runs of it has been aborted.
                let arrived = match &sent {
                    Ok(done) => done.clone(),
                    Err(_) => Arc::new(comm.mark()?),
                };
                under_way.push_back(LaneMessage { tensor, number, arrived });
                sent?;
            }
            Err(RecvTimeoutError::Timeout) => rank.watch.check()?,
            Err(RecvTimeoutError::Disconnected) => break,
        }
        while under_way.front().is_some_and(|message| message.arrived.is_complete()) {
            under_way.pop_front();
        }
    }
    for message in &under_way {
        if !comm.arrives(&message.arrived, message.number)? {
            break; // nobody will receive the rest
        }
    }
    Ok(())
}
