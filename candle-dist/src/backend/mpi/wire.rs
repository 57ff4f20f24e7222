//! Messages between processes: sent without waiting, received whenever a thread checks.
//!
//! A message is a letter: a [`MessageHeader`], followed by its data if that is small, since a copy is then cheaper than a
//! second message. Letters between ranks of a host go through shared memory (`shared.rs`). Large data is sent separately, from the sender's memory to the receiver's, once the receiver knows
//! its destination. MPI then moves it, as one copy if ranks share a host. Every process always has receives open for
//! letters of other hosts, so that a sender never waits for one.
//!
//! Letters and large data have a communicator each. MPI looks for a letter among all messages of a communicator that nobody has
//! asked for, and large data that a program receives later would be among them.
use super::header::{Body, HEADER_BYTES, LETTER, MessageHeader};
use super::native::{MpiError, MpiRequest, MpiResult, MpiStatus, PrivateComm};
use super::room::{SpareBuffers, UninitBuffer};
use super::shared::{LetterParts, Neighbors};
use super::transfer::{Direction, Route, Transfer, TransferMemory};
use super::work::bytes_of;
use crate::Result;
use crate::backend::guards::Hold;
use candle_core::{DType, StorageRef, Tensor};
use std::collections::VecDeque;
use std::mem;
use std::time::Duration;

/// The tag of letters; data that follows one has its own.
const LETTERS: i32 = 0;
/// Data of up to this many bytes is sent with its header in a message of MPI, unless its plan says otherwise. In shared memory it
/// is as much as fits into a letter: two copies take less time than the messages that a transfer needs to begin and to end.
pub(super) const TOGETHER: usize = 8 << 10;
/// MPI counts the bytes of a message in 31 bits; larger data is sent in several messages.
pub(super) const MOST_BYTES: usize = 1 << 30;
/// The number of open receives for letters: as many may arrive between two checks without another copy.
const OPEN: usize = 8;
/// With this many open, new ones can wait until there is nothing else to do.
const ENOUGH: usize = OPEN / 2;
/// The bytes that MPI implementations send eagerly, with their own header. Between ranks of a host two such messages
/// take half the time of a slightly larger one, which needs a handshake.
const AT_ONCE: usize = 3968;
/// The most letters, and the most parcels, that are looked at each time: many may wait for their receivers.
const TESTS: usize = 64;
/// The buffers of sent letters that are kept.
const SPARE_LETTERS: usize = 32;

/// This process's end of all connections.
pub(super) struct Wire {
    /// For large data, and for the end.
    comm: PrivateComm,
    letter_comm: PrivateComm,
    /// The ranks whose letters come through shared memory.
    neighbors: Option<Neighbors>,
    /// The number of receives for letters of other ranks; 0 if there are none.
    listening: usize,
    /// The open receives, in the order in which MPI fills them.
    inbox: VecDeque<(Vec<u8>, MpiRequest)>,
    /// Memory of letters that were read, for which no receive is open yet.
    read: Vec<Vec<u8>>,
    /// Letters that MPI is not done with.
    letters: Vec<(Vec<u8>, MpiRequest)>,
    spare_letters: Vec<Vec<u8>>,
    /// Letters whose second half has not arrived: the first half, and the whole.
    halves: Vec<(MpiStatus, IncomingLetter)>,
    /// Sent tensors that MPI is not done with.
    parcels: Vec<TransferMemory>,
    /// The letter and the parcel that are looked at next.
    next_letter: usize,
    next_parcel: usize,
    rooms: SpareBuffers,
    most_bytes: usize,
    next_tag: i32,
}

/// An arrived letter.
pub(super) struct IncomingLetter {
    /// The sender, as a rank of the world.
    pub(super) from: usize,
    pub(super) header: MessageHeader,
    /// The bytes of all.
    len: usize,
    /// Its memory; `None` if it lies in the memory that its sender shares, until it is put back.
    room: Option<Vec<u8>>,
}

/// The data of a letter.
#[derive(Clone, Copy)]
pub(super) enum LetterData<'a> {
    /// In memory of this process.
    Here(&'a [u8]),
    /// In memory that the sender shares, behind the header. The number is that of the bytes.
    Shared(&'a Neighbors, usize),
}

impl LetterData<'_> {
    pub(super) fn len(self) -> usize {
        match self {
            Self::Here(data) => data.len(),
            Self::Shared(_, len) => len,
        }
    }

    /// Copies `len` bytes, from `start` on, to `to`.
    ///
    /// # Safety
    /// The data has these bytes, and `to` has room for them.
    pub(super) unsafe fn copy(self, start: usize, to: *mut u8, len: usize) {
        match self {
            // SAFETY: the caller's promise.
            Self::Here(data) => unsafe {
                to.copy_from_nonoverlapping(data[start..start + len].as_ptr(), len);
            },
            // SAFETY: the caller's promise; the letter has this data behind its header, and was not put back.
            Self::Shared(neighbors, _) => unsafe { neighbors.copy(HEADER_BYTES + start, to, len) },
        }
    }

    pub(super) fn to_vec(self) -> Vec<u8> {
        let mut data = vec![0; self.len()];
        // SAFETY: the vector has room for all of it.
        unsafe { self.copy(0, data.as_mut_ptr(), data.len()) };
        data
    }
}

// SAFETY: the requests are used under the backend's lock, by one thread at a time, as MPI was started for.
unsafe impl Send for Wire {}

impl Wire {
    /// Creates the wire over `comm`, which nothing else uses, for `size` ranks. Up to `most_sharing` ranks of a host
    /// exchange letters through shared memory. All ranks call this, and wait for each other.
    pub(super) fn new(
        comm: PrivateComm,
        size: usize,
        most_bytes: usize,
        most_sharing: usize,
    ) -> MpiResult<Self> {
        let letter_comm = comm.duplicate()?;
        let neighbors = if most_sharing > 1 { Neighbors::open(&comm, size, most_sharing)? } else { None };
        let listening =
            if neighbors.as_ref().is_some_and(|neighbors| neighbors.len() == size) { 0 } else { OPEN };
        let mut wire = Self {
            comm,
            letter_comm,
            neighbors,
            listening,
            inbox: VecDeque::new(),
            read: Vec::new(),
            letters: Vec::new(),
            spare_letters: Vec::new(),
            halves: Vec::new(),
            parcels: Vec::new(),
            next_letter: 0,
            next_parcel: 0,
            rooms: SpareBuffers::default(),
            most_bytes,
            next_tag: LETTERS,
        };
        for _ in 0..listening {
            wire.listen(Self::room())?;
        }
        Ok(wire)
    }

    pub(super) fn comm(&self) -> &PrivateComm {
        &self.comm
    }

    /// Returns whether MPI must still be called for messages that were posted here.
    pub(super) fn is_sending(&self) -> bool {
        !self.letters.is_empty()
            || !self.parcels.is_empty()
            || self.neighbors.as_ref().is_some_and(Neighbors::is_sending)
    }

    /// Allocates memory for the longest letter.
    fn room() -> Vec<u8> {
        vec![0; HEADER_BYTES + LETTER]
    }

    /// Opens a receive for a letter in this memory.
    fn listen(&mut self, mut room: Vec<u8>) -> MpiResult<()> {
        // SAFETY: the memory is kept with its request until that is done; `abandon` leaves both to MPI.
        let request = unsafe { self.letter_comm.receive(room.as_mut_ptr(), room.len(), None, LETTERS)? };
        self.inbox.push_back((room, request));
        Ok(())
    }

    /// Returns the data that came with the header of a letter that was not [put back](Self::put_back).
    pub(super) fn data<'a>(&'a self, letter: &'a IncomingLetter) -> LetterData<'a> {
        match (&letter.room, &self.neighbors) {
            (Some(room), _) => LetterData::Here(&room[HEADER_BYTES..letter.len]),
            (None, Some(neighbors)) => LetterData::Shared(neighbors, letter.len - HEADER_BYTES),
            (None, None) => LetterData::Here(&[]),
        }
    }

    /// Takes the memory of a letter back: its sender may use it again, or a receive for other letters is opened, while
    /// this process waits or when few are left.
    pub(super) fn put_back(&mut self, letter: IncomingLetter) -> MpiResult<()> {
        let Some(room) = letter.room else {
            if let Some(neighbors) = &mut self.neighbors {
                neighbors.take(letter.len);
            }
            return Ok(());
        };
        self.read.push(room);
        match self.inbox.len() < ENOUGH.min(self.listening) {
            true => self.listen_again(),
            false => Ok(()),
        }
    }

    /// Opens all receives again.
    pub(super) fn listen_again(&mut self) -> MpiResult<()> {
        while self.inbox.len() < self.listening {
            let Some(room) = self.read.pop() else { break };
            self.listen(room)?;
        }
        self.read.truncate(OPEN);
        Ok(())
    }

    /// Returns the next letter, if one has arrived. It must be [put back](Self::put_back) before the next one.
    pub(super) fn next(&mut self) -> MpiResult<Option<IncomingLetter>> {
        if let Some(neighbors) = &mut self.neighbors
            && let Some(MpiStatus { from, len }) = neighbors.next()?
        {
            let mut header = [0; HEADER_BYTES];
            let here = len.min(HEADER_BYTES);
            // SAFETY: the letter has at least `here` bytes, and was not taken.
            unsafe { neighbors.copy(0, header.as_mut_ptr(), here) };
            let header = MessageHeader::decode(&header[..here]);
            let header = header.ok_or_else(|| MpiError::new("a letter without a header"))?;
            return Ok(Some(IncomingLetter { from, header, len, room: None }));
        }
        while let Some((_, request)) = self.inbox.front_mut() {
            let Some(came) = request.test()? else { break };
            let Some((room, _)) = self.inbox.pop_front() else { break };
            let MpiStatus { from, len } = came;
            // MPI keeps the order of letters of one sender, so the next one is the other half.
            if let Some(at) = self.halves.iter().position(|(first, _)| first.from == from) {
                let (here, mut whole) = self.halves.swap_remove(at);
                if here.len + len != whole.len {
                    return Err(MpiError::new("a letter whose halves do not fit"));
                }
                if let Some(whole_room) = &mut whole.room {
                    whole_room[here.len..whole.len].copy_from_slice(&room[..len]);
                }
                self.read.push(room);
                return Ok(Some(whole));
            }
            let header = MessageHeader::decode(&room[..len])
                .ok_or_else(|| MpiError::new("a message without a header"))?;
            let whole = if header.body == Body::Here {
                HEADER_BYTES.saturating_add(header.bytes())
            } else {
                HEADER_BYTES
            };
            if whole <= len || whole > room.len() {
                return Ok(Some(IncomingLetter { from, header, len, room: Some(room) }));
            }
            self.halves.push((came, IncomingLetter { from, header, len: whole, room: Some(room) }));
            // Halves of many senders must not use up the open receives.
            let room = self.read.pop().unwrap_or_else(Self::room);
            self.listen(room)?;
        }
        Ok(None)
    }

    /// Returns whether data of this many bytes is sent to a rank together with its header.
    pub(super) fn goes_together(&self, to: usize, bytes: usize) -> bool {
        let is_shared = self.neighbors.as_ref().is_some_and(|neighbors| neighbors.has(to));
        bytes <= if is_shared { LETTER } else { TOGETHER }
    }

    /// Sends a header together with its data.
    pub(super) fn post<'a>(
        &mut self,
        to: usize,
        header: &MessageHeader,
        data: impl IntoIterator<Item = &'a [u8]>,
    ) -> MpiResult<()> {
        let encoded = header.encode();
        if let Some(neighbors) = self.neighbors.as_mut().filter(|neighbors| neighbors.has(to)) {
            let data = data.into_iter().map(|data: &[u8]| data);
            let parts: LetterParts<'_> = std::iter::once(&encoded[..]).chain(data).collect();
            return neighbors.post(to, &parts);
        }
        let mut letter = self.spare_letters.pop().unwrap_or_default();
        letter.extend_from_slice(&encoded);
        data.into_iter().for_each(|data| letter.extend_from_slice(data));
        if letter.len() <= AT_ONCE || letter.len() > 2 * AT_ONCE {
            return self.post_bytes(to, letter);
        }
        // Two halves of the same size: one is read while the other arrives.
        let mut half = self.spare_letters.pop().unwrap_or_default();
        let middle = letter.len().div_ceil(2);
        half.extend_from_slice(&letter[middle..]);
        letter.truncate(middle);
        self.post_bytes(to, letter)?;
        self.post_bytes(to, half)
    }

    fn post_bytes(&mut self, to: usize, letter: Vec<u8>) -> MpiResult<()> {
        // SAFETY: the letter is kept with its request until that is done; `abandon` leaves both to MPI.
        let request = unsafe { self.letter_comm.send(letter.as_ptr(), letter.len(), to, LETTERS)? };
        // Kept first: after an error of the test, MPI may still read it.
        self.letters.push((letter, request));
        let sent = self.letters.last_mut().map_or(Ok(None), |(_, request)| request.test())?;
        if let Some((letter, _)) = self.letters.pop_if(|_| sent.is_some()) {
            self.keep(letter);
        }
        Ok(())
    }

    fn keep(&mut self, mut letter: Vec<u8>) {
        if self.spare_letters.len() < SPARE_LETTERS {
            letter.clear();
            self.spare_letters.push(letter);
        }
    }

    /// Sends a header, and then its data from the memory of the tensor.
    ///
    /// # Safety
    /// As for [`Transfer::start`].
    pub(super) unsafe fn post_large(
        &mut self,
        to: usize,
        header: MessageHeader,
        data: *const u8,
        transfers: &mut Vec<Transfer>,
    ) -> MpiResult<()> {
        // Fewer transfers are in flight between two ranks than there are tags.
        self.next_tag = if self.next_tag >= self.comm.most_tag { LETTERS + 1 } else { self.next_tag + 1 };
        let header = MessageHeader { body: Body::Follows(self.next_tag), ..header };
        self.post(to, &header, [])?;
        let route = Route { way: Direction::Out, peer: to, tag: self.next_tag };
        // SAFETY: the caller's promise; outgoing bytes are not written.
        unsafe {
            Transfer::start(&self.comm, route, data.cast_mut(), header.bytes(), self.most_bytes, transfers)
        }
    }

    /// Requests the data that follows a header, and writes it to `data`.
    ///
    /// # Safety
    /// As for [`Transfer::start`], with the number of bytes in the header.
    pub(super) unsafe fn receive(
        &mut self,
        from: usize,
        header: &MessageHeader,
        data: *mut u8,
        transfers: &mut Vec<Transfer>,
    ) -> MpiResult<()> {
        let Body::Follows(tag) = header.body else { return Err(MpiError::new("data that does not follow")) };
        let route = Route { way: Direction::In, peer: from, tag };
        // SAFETY: the caller's promise.
        unsafe { Transfer::start(&self.comm, route, data, header.bytes(), self.most_bytes, transfers) }
    }

    /// Requests the data that follows a header, into new memory.
    pub(super) fn receive_all(
        &mut self,
        from: usize,
        header: &MessageHeader,
    ) -> Result<TransferMemory, Box<dyn std::error::Error>> {
        let room = UninitBuffer::new(header.dtype, header.len)?;
        let address = room.data();
        let mut held = TransferMemory::new(None, Some(room), None);
        // SAFETY: the room has the bytes that the header tells; the held one keeps it until the transfer is done, or leaves
        // it to MPI.
        unsafe { self.receive(from, header, address, &mut held.incoming)? };
        Ok(held)
    }

    /// Sends a tensor, which is contiguous and on the host, and holds it until MPI is done with it.
    ///
    /// # Safety
    /// `guard` is a lock of the tensor's storage.
    pub(super) unsafe fn post_tensor(
        &mut self,
        to: usize,
        header: MessageHeader,
        tensor: &Tensor,
        guard: &StorageRef<'_>,
    ) -> Result<(), Box<dyn std::error::Error>> {
        let data = bytes_of(tensor, guard)?;
        if self.goes_together(to, data.len()) {
            return Ok(self.post(to, &header, [data])?);
        }
        // SAFETY: the caller's promise.
        let hold = unsafe { Hold::new(tensor, guard) };
        let mut parcel = TransferMemory::new(Some(hold), None, None);
        // SAFETY: the parcel holds the tensor, so that nobody writes to it or frees it, and leaves it to MPI if it is dropped
        // before.
        unsafe { self.post_large(to, header, data.as_ptr(), &mut parcel.outgoing)? };
        if !parcel.poll(&self.comm)? {
            self.parcels.push(parcel);
        }
        Ok(())
    }

    /// Drives MPI for sent messages; returns true if anything is done.
    pub(super) fn poll(&mut self) -> MpiResult<bool> {
        let flushed = self.neighbors.as_mut().is_some_and(Neighbors::flush);
        let before = self.letters.len() + self.parcels.len();
        for _ in 0..self.letters.len().min(TESTS) {
            self.next_letter = if self.next_letter < self.letters.len() { self.next_letter } else { 0 };
            match self.letters.get_mut(self.next_letter).map_or(Ok(None), |(_, request)| request.test())? {
                Some(_) => {
                    let (letter, _) = self.letters.swap_remove(self.next_letter);
                    self.keep(letter);
                }
                None => self.next_letter += 1,
            }
        }
        for _ in 0..self.parcels.len().min(TESTS) {
            self.next_parcel = if self.next_parcel < self.parcels.len() { self.next_parcel } else { 0 };
            match self
                .parcels
                .get_mut(self.next_parcel)
                .map_or(Ok(false), |parcel| parcel.poll(&self.comm))?
            {
                true => drop(self.parcels.swap_remove(self.next_parcel)),
                false => self.next_parcel += 1,
            }
        }
        Ok(flushed || self.letters.len() + self.parcels.len() < before)
    }

    /// Returns how long a write has waited for a sent tensor.
    pub(super) fn awaited(&mut self) -> Duration {
        self.parcels.iter_mut().map(TransferMemory::awaited).max().unwrap_or_default()
    }

    /// Returns temporary memory.
    pub(super) fn scratch(&mut self, dtype: DType, len: usize) -> Result<UninitBuffer> {
        self.rooms.take(dtype, len)
    }

    /// Takes temporary memory back for reuse.
    pub(super) fn give_back(&mut self, room: UninitBuffer) {
        self.rooms.keep(room);
    }

    /// Drops letters that no rank of this host will read.
    pub(super) fn give_up_letters(&mut self) {
        if let Some(neighbors) = &mut self.neighbors {
            neighbors.give_up();
        }
    }

    /// Ends this process's part, when no message is in flight any more.
    pub(super) fn close(mut self) -> MpiResult<()> {
        let mut inbox = mem::take(&mut self.inbox);
        while let Some((room, request)) = inbox.pop_front() {
            if let Err(error) = request.cancel() {
                mem::forget((room, inbox));
                return Err(error);
            }
        }
        if let Some(neighbors) = self.neighbors.take() {
            neighbors.close()?;
        }
        self.letter_comm.free()?;
        self.comm.free()
    }

    /// Leaves the tensors that are under way to MPI, which must not be called any more. Others may write to them.
    pub(super) fn leave_parcels(&mut self) {
        self.parcels.clear();
    }

    /// Leaks the memory of all messages to MPI: after a failure it is not known when MPI is done with it.
    pub(super) fn abandon(mut self) {
        self.leave_parcels();
        mem::forget(self);
    }
}
