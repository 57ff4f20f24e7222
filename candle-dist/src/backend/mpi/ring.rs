//! Letters from one process to another through memory that both have: a queue of bytes with one writer and one reader.
//!
//! The writer owns the count of written bytes and the reader the count of read bytes. Each publishes its count after it
//! has touched the bytes, and reads the other's count before, so neither touches a byte that the other still uses. The
//! test `letters` runs this file under loom, with loom's cells as the memory.
use std::sync::atomic::Ordering;

/// The bytes of a ring's letters; a power of two.
pub(super) const CAPACITY: usize = 64 << 10;
/// A letter begins with its length, and its end is padded to as many bytes.
const WORD: usize = size_of::<u64>();

/// The two counts of a ring.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RingCount {
    Written,
    Read,
}

/// The memory of one ring, shared by its two ends.
pub(super) trait RingMemory {
    /// The bytes of the letters.
    fn capacity(&self) -> usize;
    fn load(&self, count: RingCount, order: Ordering) -> u64;
    fn store(&self, count: RingCount, value: u64, order: Ordering);
    /// Writes bytes at an offset.
    ///
    /// # Safety
    /// The bytes lie within the capacity, and the other end does not use them.
    unsafe fn write(&self, at: usize, bytes: &[u8]);
    /// Copies `len` bytes at an offset to `to`.
    ///
    /// # Safety
    /// As for `write`; the bytes have been written. `to` has room for them.
    unsafe fn read(&self, at: usize, to: *mut u8, len: usize);
}

/// Returns the bytes that a letter of `len` bytes occupies.
const fn occupied(len: usize) -> usize {
    WORD + len.next_multiple_of(WORD)
}

/// The end that writes.
pub(super) struct Writer<M> {
    memory: M,
    written: u64,
    /// The count of read bytes, as last seen.
    read: u64,
}

impl<M: RingMemory> Writer<M> {
    /// Takes the writing end of a ring that nobody has used.
    ///
    /// # Safety
    /// There is no other writer of this memory, and both of its counts are 0.
    pub(super) const unsafe fn new(memory: M) -> Self {
        Self { memory, written: 0, read: 0 }
    }

    /// Returns whether a letter of this size can ever be written.
    pub(super) fn fits(&self, len: usize) -> bool {
        occupied(len) <= self.memory.capacity()
    }

    /// Writes a letter in parts; returns false if there is no room for it now.
    pub(super) fn push(&mut self, parts: &[&[u8]]) -> bool {
        let len = parts.iter().map(|part| part.len()).sum::<usize>();
        if !self.has_room(occupied(len)) {
            self.read = self.memory.load(RingCount::Read, Ordering::Acquire);
            if !self.has_room(occupied(len)) {
                return false;
            }
        }
        let mut at = self.written;
        let length = (len as u64).to_ne_bytes();
        for part in std::iter::once(&length[..]).chain(parts.iter().copied()) {
            self.write(at, part);
            at += part.len() as u64;
        }
        self.written += occupied(len) as u64;
        self.memory.store(RingCount::Written, self.written, Ordering::Release);
        true
    }

    fn has_room(&self, bytes: usize) -> bool {
        self.written - self.read + bytes as u64 <= self.memory.capacity() as u64
    }

    fn write(&self, at: u64, bytes: &[u8]) {
        let (start, first) = split(at, bytes.len(), self.memory.capacity());
        // SAFETY: the reader has read what was here before, by the count that was acquired, and does not look at it again
        // before the count of written bytes says so. This is the only writer.
        unsafe {
            self.memory.write(start, &bytes[..first]);
            self.memory.write(0, &bytes[first..]);
        }
    }
}

/// The end that reads.
pub(super) struct Reader<M> {
    memory: M,
    read: u64,
    /// The count of written bytes, as last seen.
    written: u64,
}

impl<M: RingMemory> Reader<M> {
    /// Takes the reading end of a ring that nobody has used.
    ///
    /// # Safety
    /// There is no other reader of this memory, and both of its counts are 0.
    pub(super) const unsafe fn new(memory: M) -> Self {
        Self { memory, read: 0, written: 0 }
    }

    /// Returns the length of the next letter, if there is one. The letter stays until it is [taken](Self::take).
    ///
    /// # Errors
    /// Returns a length that no letter can have.
    pub(super) fn next(&mut self) -> Result<Option<usize>, u64> {
        if self.read == self.written {
            self.written = self.memory.load(RingCount::Written, Ordering::Acquire);
            if self.read == self.written {
                return Ok(None);
            }
        }
        let mut length = [0; WORD];
        // SAFETY: a letter begins with its length.
        unsafe { self.bytes(self.read, length.as_mut_ptr(), WORD) };
        let length = u64::from_ne_bytes(length);
        let most = self.memory.capacity() - WORD;
        usize::try_from(length).ok().filter(|&len| len <= most).map(Some).ok_or(length)
    }

    /// Copies `len` bytes of the next letter, from `start` on, to `to`.
    ///
    /// # Safety
    /// The next letter has these bytes, and `to` has room for them.
    pub(super) unsafe fn copy(&self, start: usize, to: *mut u8, len: usize) {
        // SAFETY: the caller's promise.
        unsafe { self.bytes(self.read + (WORD + start) as u64, to, len) };
    }

    /// Takes the next letter, which has `len` bytes: the writer may use its place again.
    pub(super) fn take(&mut self, len: usize) {
        self.read += occupied(len) as u64;
        self.memory.store(RingCount::Read, self.read, Ordering::Release);
    }

    /// Copies bytes.
    ///
    /// # Safety
    /// They belong to the next letter, and `to` has room for them.
    unsafe fn bytes(&self, at: u64, to: *mut u8, len: usize) {
        let (start, first) = split(at, len, self.memory.capacity());
        // SAFETY: the count of written bytes, which was acquired, covers the whole letter, and the writer leaves it alone
        // until the count of read bytes says that it may go. This is the only reader. The rest is the caller's promise.
        unsafe {
            self.memory.read(start, to, first);
            if first < len {
                self.memory.read(0, to.add(first), len - first);
            }
        }
    }
}

/// Returns where `len` bytes begin, and how many of them lie before the end of the memory.
const fn split(at: u64, len: usize, capacity: usize) -> (usize, usize) {
    let start = at as usize & (capacity - 1);
    let before = capacity - start;
    (start, if len < before { len } else { before })
}
