//! The ranks of a host that exchange letters through shared memory, which takes less time than a message of MPI.
//!
//! Each rank has a segment of a window that MPI allocates, with a ring for each of these ranks, itself included. A rank
//! writes its letters to the ring with its number in the segment of the receiver. Letters that find no room wait here,
//! so that a send never waits.
use super::native::{MpiError, MpiResult, MpiStatus, MpiWindow, PrivateComm};
use super::ring::{CAPACITY, Reader, RingCount, RingMemory, Writer};
use smallvec::SmallVec;
use std::collections::VecDeque;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};

/// The bytes before the letters of a ring: the two counts, so far apart that neither end disturbs the other.
const COUNTS: usize = 256;
/// The bytes of a ring.
const RING: usize = COUNTS + CAPACITY;

/// Returns the bytes of shared memory that the `ranks` of a host take, if up to `most` of them share it.
pub(super) fn bytes(ranks: usize, most: usize) -> u64 {
    let most = most.max(1);
    let of = |part: usize| if part < 2 { 0 } else { (part * part * RING) as u64 };
    (ranks / most) as u64 * of(most) + of(ranks % most)
}

/// The ranks with which this one shares memory.
pub(super) struct Neighbors {
    window: MpiWindow,
    all: Vec<Neighbor>,
    /// The index of each rank of the world in `all`.
    of: Vec<Option<usize>>,
    /// The neighbor whose letters are read next.
    next: usize,
}

struct Neighbor {
    rank: usize,
    writer: Writer<SharedRing>,
    reader: Reader<SharedRing>,
    /// Letters that had no room yet.
    waiting: VecDeque<Vec<u8>>,
}

impl Neighbors {
    /// Shares memory among up to `most` ranks of each host. All ranks of `comm` call this, and wait for each other.
    ///
    /// Returns `None` if this rank shares memory with no other one, or if there is no memory for all.
    pub(super) fn open(comm: &PrivateComm, size: usize, most: usize) -> MpiResult<Option<Self>> {
        let Some(window) = comm.share(most, RING, COUNTS)? else { return Ok(None) };
        let mut of = vec![None; size];
        let mine = window.segment(window.rank)?;
        let mut all = Vec::with_capacity(window.size);
        for index in 0..window.size {
            let rank = comm.rank_of(&window, index)?;
            // SAFETY: the segments have a ring for each rank, with counts that were zeroed before any rank came here. Each ring has one writer,
            // the rank with its number, and one reader, the rank with its segment.
            let (writer, reader) = unsafe {
                (
                    Writer::new(SharedRing::at(window.segment(index)?, window.rank)),
                    Reader::new(SharedRing::at(mine, index)),
                )
            };
            *of.get_mut(rank).ok_or_else(|| MpiError::new("a rank outside of the world"))? = Some(index);
            all.push(Neighbor { rank, writer, reader, waiting: VecDeque::new() });
        }
        Ok(Some(Self { window, all, of, next: 0 }))
    }

    /// Returns the number of ranks that share this memory.
    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    /// Returns whether letters to a rank go through shared memory.
    pub(super) fn has(&self, rank: usize) -> bool {
        self.of.get(rank).is_some_and(Option::is_some)
    }

    /// Sends a letter in parts to a rank that [is here](Self::has).
    pub(super) fn post(&mut self, to: usize, parts: &[&[u8]]) -> MpiResult<()> {
        let index = self.of.get(to).copied().flatten();
        let Some(neighbor) = index.and_then(|index| self.all.get_mut(index)) else {
            return Err(MpiError::new("a letter to a rank of another host"));
        };
        if !neighbor.writer.fits(parts.iter().map(|part| part.len()).sum()) {
            return Err(MpiError::new("a letter that is larger than the shared memory"));
        }
        if !neighbor.waiting.is_empty() || !neighbor.writer.push(parts) {
            neighbor.waiting.push_back(parts.concat());
        }
        Ok(())
    }

    /// Writes letters that had no room; returns whether there was room for any.
    pub(super) fn flush(&mut self) -> bool {
        let mut moved = false;
        for Neighbor { writer, waiting, .. } in &mut self.all {
            while waiting.front().is_some_and(|letter| writer.push(&[letter])) {
                waiting.pop_front();
                moved = true;
            }
        }
        moved
    }

    /// Returns whether letters wait for room.
    pub(super) fn is_sending(&self) -> bool {
        self.all.iter().any(|neighbor| !neighbor.waiting.is_empty())
    }

    /// Drops the letters that wait for room: their receivers have stopped reading.
    pub(super) fn give_up(&mut self) {
        self.all.iter_mut().for_each(|neighbor| neighbor.waiting.clear());
    }

    /// Returns the sender and the length of the next letter, if one has arrived. It stays until it is
    /// [taken](Self::take). The neighbors take turns.
    pub(super) fn next(&mut self) -> MpiResult<Option<MpiStatus>> {
        for _ in 0..self.all.len() {
            let Some(neighbor) = self.all.get_mut(self.next) else { break };
            let next = neighbor.reader.next();
            let next =
                next.map_err(|len| MpiError::new(&format!("a letter of {len} bytes in shared memory")))?;
            if let Some(len) = next {
                return Ok(Some(MpiStatus { from: neighbor.rank, len }));
            }
            self.next = (self.next + 1) % self.all.len();
        }
        Ok(None)
    }

    /// Copies `len` bytes of the next letter, from `start` on, to `to`.
    ///
    /// # Safety
    /// [`next`](Self::next) has found a letter with these bytes, which was not taken. `to` has room for them.
    pub(super) unsafe fn copy(&self, start: usize, to: *mut u8, len: usize) {
        if let Some(neighbor) = self.all.get(self.next) {
            // SAFETY: the caller's promise; `next` stops at the neighbor whose letter it finds.
            unsafe { neighbor.reader.copy(start, to, len) };
        }
    }

    /// Takes the next letter, which has `len` bytes.
    pub(super) fn take(&mut self, len: usize) {
        if let Some(neighbor) = self.all.get_mut(self.next) {
            neighbor.reader.take(len);
        }
    }

    /// Frees the memory, together with all its ranks. No letter is under way.
    pub(super) fn close(self) -> MpiResult<()> {
        self.window.free()
    }
}

/// The folder in which MPI keeps shared memory. Containers often have little room there.
#[cfg(unix)]
const FOLDER: &str = "/dev/shm";

/// Returns the bytes that are free for shared memory here. `None` without a limit, and without the folder: then MPI has another way.
#[cfg(unix)]
pub(super) fn free() -> Option<u64> {
    let found = rustix::fs::statvfs(FOLDER).ok().filter(|found| found.f_blocks > 0)?;
    Some(found.f_bavail.saturating_mul(found.f_frsize))
}

#[cfg(not(unix))]
pub(super) const fn free() -> Option<u64> {
    None
}

/// A ring in a segment of the window.
struct SharedRing {
    counts: [NonNull<AtomicU64>; 2],
    letters: NonNull<u8>,
}

// SAFETY: a ring is used under the backend's lock, by one thread of this process at a time.
unsafe impl Send for SharedRing {}

impl SharedRing {
    /// Returns a ring of a segment.
    ///
    /// # Safety
    /// The segment has more rings than `index`, and stays mapped while the ring is used.
    unsafe fn at(segment: NonNull<u8>, index: usize) -> Self {
        // SAFETY: the caller's promise. `MpiWindow::segment` has checked that the address fits for atomics.
        unsafe {
            let start = segment.add(index * RING);
            Self { counts: [start.cast(), start.add(COUNTS / 2).cast()], letters: start.add(COUNTS) }
        }
    }

    fn count(&self, which: RingCount) -> &AtomicU64 {
        let [written, read] = &self.counts;
        let count = if which == RingCount::Written { written } else { read };
        // SAFETY: the count lies in memory that stays mapped, and all processes access it only as an atomic.
        unsafe { count.as_ref() }
    }
}

impl RingMemory for SharedRing {
    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn load(&self, count: RingCount, order: Ordering) -> u64 {
        self.count(count).load(order)
    }

    fn store(&self, count: RingCount, value: u64, order: Ordering) {
        self.count(count).store(value, order);
    }

    unsafe fn write(&self, at: usize, bytes: &[u8]) {
        // SAFETY: the caller's promise.
        unsafe { self.letters.add(at).copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len()) };
    }

    unsafe fn read(&self, at: usize, to: *mut u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { to.copy_from_nonoverlapping(self.letters.add(at).as_ptr(), len) };
    }
}

/// The parts of a letter.
pub(super) type LetterParts<'a> = SmallVec<[&'a [u8]; 4]>;
