//! Transfers of data by MPI from or to the memory of tensors, without a copy.
use super::native::{MpiRequest, MpiResult, PrivateComm};
use super::room::UninitBuffer;
use crate::backend::guards::Hold;
use std::collections::VecDeque;
use std::mem;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

/// The most parts of one transfer that are in flight at once: each costs an MPI request.
const WINDOW: usize = 8;

/// The direction of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Direction {
    Out,
    In,
}

/// The data of a transfer and its peer.
#[derive(Debug, Clone, Copy)]
pub(super) struct Route {
    pub(super) way: Direction,
    /// The other side, as a rank of the world.
    pub(super) peer: usize,
    /// Unique among the transfers in flight between the two ranks.
    pub(super) tag: i32,
}

/// What moves the parts of transfers: MPI, except in tests.
pub(super) trait Channel {
    /// Starts to move `len` bytes.
    ///
    /// # Safety
    /// As for [`PrivateComm::send`] and [`PrivateComm::receive`].
    unsafe fn post(&self, route: Route, data: *mut u8, len: usize) -> MpiResult<MpiRequest>;
}

impl Channel for PrivateComm {
    unsafe fn post(
        &self,
        Route { way, peer, tag }: Route,
        data: *mut u8,
        len: usize,
    ) -> MpiResult<MpiRequest> {
        // SAFETY: the caller's promise.
        unsafe {
            match way {
                Direction::Out => self.send(data, len, peer, tag),
                Direction::In => self.receive(data, len, Some(peer), tag),
            }
        }
    }
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
    parts: VecDeque<MpiRequest>,
}

// SAFETY: the address is used under the backend's lock, by one thread at a time.
unsafe impl Send for Transfer {}

impl Transfer {
    /// Starts to move `len` bytes, in parts of at most `most_bytes`, and adds the transfer to `transfers`: also after an
    /// error, because some parts may be in flight.
    ///
    /// # Safety
    /// The bytes are not moved until [`poll`](Self::poll) says that the transfer is done. Until then outgoing bytes are
    /// not written, and incoming bytes are not read or written. If the transfer is dropped before, the bytes are never
    /// freed.
    pub(super) unsafe fn start(
        comm: &impl Channel,
        route: Route,
        data: *mut u8,
        len: usize,
        most_bytes: usize,
        transfers: &mut Vec<Self>,
    ) -> MpiResult<()> {
        transfers.push(Self { route, data, len, posted: 0, most_bytes, parts: VecDeque::new() });
        transfers.last_mut().map_or(Ok(()), |transfer| transfer.post(comm))
    }

    fn post(&mut self, comm: &impl Channel) -> MpiResult<()> {
        while self.posted < self.len && self.parts.len() < WINDOW {
            let part = self.most_bytes.min(self.len - self.posted);
            // SAFETY: the part lies within the bytes that `start` was promised.
            let request = unsafe { comm.post(self.route, self.data.add(self.posted), part)? };
            self.posted += part;
            self.parts.push_back(request);
        }
        Ok(())
    }

    /// Drives MPI; returns whether all is done.
    pub(super) fn poll(&mut self, comm: &PrivateComm) -> MpiResult<bool> {
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
pub(super) fn poll_all(transfers: &mut Vec<Transfer>, comm: &PrivateComm) -> MpiResult<()> {
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
pub(super) struct TransferMemory {
    /// The tensor that is read.
    pub(super) input: Option<Hold>,
    pub(super) result: Option<UninitBuffer>,
    pub(super) scratch: Option<UninitBuffer>,
    pub(super) outgoing: Vec<Transfer>,
    pub(super) incoming: Vec<Transfer>,
}

impl TransferMemory {
    pub(super) const fn new(
        input: Option<Hold>,
        result: Option<UninitBuffer>,
        scratch: Option<UninitBuffer>,
    ) -> Self {
        Self { input, result, scratch, outgoing: Vec::new(), incoming: Vec::new() }
    }

    /// Returns how long a write has waited for the tensor that is read.
    pub(super) fn awaited(&mut self) -> Duration {
        self.input.as_mut().map_or(Duration::ZERO, Hold::awaited)
    }

    /// Drives MPI; returns whether it is done with the memory.
    pub(super) fn poll(&mut self, comm: &PrivateComm) -> MpiResult<bool> {
        poll_all(&mut self.incoming, comm)?;
        poll_all(&mut self.outgoing, comm)?;
        Ok(self.incoming.is_empty() && self.outgoing.is_empty())
    }
}

impl Drop for TransferMemory {
    fn drop(&mut self) {
        if self.incoming.is_empty() && self.outgoing.is_empty() {
            return;
        }
        // The world has ended early, so it is not known when MPI is done with its memory. What others read of it is not used.
        self.input.take().into_iter().for_each(Hold::leave);
        mem::forget((self.result.take(), self.scratch.take()));
        static SAID: AtomicBool = AtomicBool::new(false);
        if !SAID.swap(true, Ordering::Relaxed) {
            eprintln!(
                "candle-dist: tensors were under way when the world ended; their memory is left to MPI"
            );
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::super::native::MpiError;
    use super::*;
    use crate::backend::guards::Guards;
    use crate::backend::storage::StorageOperand;
    use candle_core::{DType, Device, Var};
    use std::cell::Cell;

    /// Takes this many parts, which never arrive.
    struct Refusing(Cell<usize>);

    impl Channel for Refusing {
        unsafe fn post(&self, _: Route, _: *mut u8, _: usize) -> MpiResult<MpiRequest> {
            let left = self.0.get().checked_sub(1).ok_or_else(|| MpiError::new("no more requests"))?;
            self.0.set(left);
            Ok(MpiRequest::unanswered())
        }
    }

    #[test]
    fn memory_of_a_start_that_fails_half_way_is_left_to_mpi() {
        for (way, taken) in [(Direction::Out, 1), (Direction::Out, 3), (Direction::In, 1)] {
            let var = Var::zeros(1000, DType::U8, &Device::Cpu).unwrap();
            let guards = Guards::new(&[StorageOperand::of(&var)]);
            // SAFETY: the lock is the variable's.
            let hold = guards.iter().next().map(|guard| unsafe { Hold::new(&var, guard) });
            drop(guards);
            let room = UninitBuffer::new(DType::U8, 1000).unwrap();
            let address = room.data();
            let mut held = TransferMemory::new(hold, Some(room), None);
            let transfers = if way == Direction::Out { &mut held.outgoing } else { &mut held.incoming };
            let route = Route { way, peer: 1, tag: 1 };
            // SAFETY: nothing is moved.
            let started =
                unsafe { Transfer::start(&Refusing(Cell::new(taken)), route, address, 1000, 100, transfers) };
            assert_eq!(started.unwrap_err().to_string(), "MPI: no more requests");
            assert_eq!(
                transfers.iter().map(|transfer| transfer.parts.len()).sum::<usize>(),
                taken,
                "parts in flight"
            );
            drop(held);
            // New memory of the same size would be at the freed address.
            let rooms: Vec<UninitBuffer> =
                (0..20).map(|_| UninitBuffer::new(DType::U8, 1000).unwrap()).collect();
            assert!(rooms.iter().all(|room| room.data() != address), "the memory was freed");
            var.zero_set().unwrap();
        }
    }
}
