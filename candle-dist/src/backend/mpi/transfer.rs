//! Transfers of data by MPI from or to the memory of tensors, without a copy.
use super::native::{MpiResult, Private, Request};
use super::room::Room;
use candle_core::Tensor;
use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};

/// The most parts of one transfer that are in flight at once: each costs an MPI request.
const WINDOW: usize = 8;

/// The direction of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Way {
    Out,
    In,
}

/// The data of a transfer and its peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    pub(super) way: Way,
    /// The other side, as a rank of the world.
    pub(super) peer: usize,
    /// Unique among the transfers in flight between the two ranks.
    pub(super) tag: i32,
}

/// The data of one message in flight, in parts.
#[derive(Debug)]
pub(super) struct Transfer {
    route: Route,
    data: *mut u8,
    len: usize,
    /// The number of bytes passed to MPI.
    posted: usize,
    most_bytes: usize,
    parts: VecDeque<Request>,
}

// SAFETY: the address is used under the backend's lock, by one thread at a time.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Starts to move `len` bytes, in parts of at most `most_bytes`.
    ///
    /// # Safety
    /// The bytes are not moved until [`poll`](Self::poll) says that the transfer is done. Until then outgoing bytes are
    /// not written, and incoming bytes are not read or written. If the transfer is dropped before, the bytes are never
    /// freed.
    pub(super) unsafe fn start(
        comm: &Private,
        route: Route,
        data: *mut u8,
        len: usize,
        most_bytes: usize,
    ) -> MpiResult<Self> {
        let mut transfer = Self { route, data, len, posted: 0, most_bytes, parts: VecDeque::new() };
        transfer.post(comm)?;
        Ok(transfer)
    }

    fn post(&mut self, comm: &Private) -> MpiResult<()> {
        let Route { way, peer, tag } = self.route;
        while self.posted < self.len && self.parts.len() < WINDOW {
            let part = self.most_bytes.min(self.len - self.posted);
            // SAFETY: the part lies within the bytes that `start` was promised.
            let request = unsafe {
                let at = self.data.add(self.posted);
                match way {
                    Way::Out => comm.send(at, part, peer, tag)?,
                    Way::In => comm.receive(at, part, Some(peer), tag)?,
                }
            };
            self.posted += part;
            self.parts.push_back(request);
        }
        Ok(())
    }

    /// Drives MPI; returns whether all is done.
    pub(super) fn poll(&mut self, comm: &Private) -> MpiResult<bool> {
        while let Some(first) = self.parts.front_mut() {
            if first.test()?.is_none() {
                return Ok(false);
            }
            self.parts.pop_front();
            self.post(comm)?;
        }
        Ok(true)
    }
}

/// Drives each transfer, and removes those that are done.
pub(super) fn poll_all(transfers: &mut Vec<Transfer>, comm: &Private) -> MpiResult<()> {
    let mut at = 0;
    while let Some(transfer) = transfers.get_mut(at) {
        match transfer.poll(comm)? {
            true => drop(transfers.swap_remove(at)),
            false => at += 1,
        }
    }
    Ok(())
}

/// Transfers and their memory, which stays for as long as MPI may access it.
pub(super) struct Held {
    pub(super) tensor: Option<Tensor>,
    pub(super) result: Option<Room>,
    pub(super) scratch: Option<Room>,
    pub(super) outgoing: Vec<Transfer>,
    pub(super) incoming: Vec<Transfer>,
}

impl Held {
    pub(super) const fn new(tensor: Option<Tensor>, result: Option<Room>, scratch: Option<Room>) -> Self {
        Self { tensor, result, scratch, outgoing: Vec::new(), incoming: Vec::new() }
    }

    /// Drives MPI; returns whether it is done with the memory.
    pub(super) fn poll(&mut self, comm: &Private) -> MpiResult<bool> {
        poll_all(&mut self.incoming, comm)?;
        poll_all(&mut self.outgoing, comm)?;
        Ok(self.incoming.is_empty() && self.outgoing.is_empty())
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        if self.incoming.is_empty() && self.outgoing.is_empty() {
            return;
        }
        // The world has failed, so it is not known when MPI is done with its memory.
        mem::forget((self.tensor.take(), self.result.take(), self.scratch.take()));
        static SAID: AtomicBool = AtomicBool::new(false);
        if !SAID.swap(true, Ordering::Relaxed) {
            eprintln!("candle-dist: the world failed while tensors were under way; their memory is left to MPI");
        }
    }
}
