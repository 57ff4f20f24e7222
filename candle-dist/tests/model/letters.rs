//! Letters through shared memory.
//!
//! `ring.rs` is the same file that the MPI backend uses. Its memory is loom's here: a byte that is read while it is
//! written, or before a count has published it, is an error.
#[allow(dead_code)] // the capacity of the backend
#[path = "../../src/backend/mpi/ring.rs"]
mod ring;

use super::explore;
use loom::cell::UnsafeCell;
use loom::sync::Arc;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::thread;
use ring::{Reader, RingCount, RingMemory, Writer};

/// Room for two letters of up to 8 bytes.
const CAPACITY: usize = 32;

struct Checked {
    written: AtomicU64,
    read: AtomicU64,
    bytes: [UnsafeCell<u8>; CAPACITY],
}

impl Checked {
    fn new() -> Arc<Self> {
        let bytes = std::array::from_fn(|_| UnsafeCell::new(0));
        Arc::new(Self { written: AtomicU64::new(0), read: AtomicU64::new(0), bytes })
    }

    fn count(&self, which: RingCount) -> &AtomicU64 {
        if which == RingCount::Written { &self.written } else { &self.read }
    }
}

impl RingMemory for Arc<Checked> {
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
        for (cell, byte) in self.bytes[at..at + bytes.len()].iter().zip(bytes) {
            // SAFETY: loom tracks the access, and fails the test if another access is concurrent.
            cell.with_mut(|cell| unsafe { *cell = *byte });
        }
    }

    unsafe fn read(&self, at: usize, to: *mut u8, len: usize) {
        for (nth, cell) in self.bytes[at..at + len].iter().enumerate() {
            // SAFETY: as in `write`; the caller's promise.
            cell.with(|cell| unsafe { *to.add(nth) = *cell });
        }
    }
}

/// Takes the next letter: its beginning and its end, which are copied one after the other.
fn pop(reader: &mut Reader<Arc<Checked>>) -> Option<Vec<u8>> {
    let len = reader.next().unwrap()?;
    let mut room = vec![0; len];
    let (first, second) = room.split_at_mut(len / 2);
    // SAFETY: the letter has `len` bytes, and each half of the room has space for its part.
    unsafe {
        reader.copy(0, first.as_mut_ptr(), first.len());
        reader.copy(first.len(), second.as_mut_ptr(), second.len());
    }
    reader.take(len);
    Some(room)
}

/// Returns both ends of a new ring.
fn ends() -> (Writer<Arc<Checked>>, Reader<Arc<Checked>>) {
    let memory = Checked::new();
    // SAFETY: these are the only two ends of new memory.
    unsafe { (Writer::new(memory.clone()), Reader::new(memory)) }
}

#[test]
fn letters_arrive_whole_and_in_order() {
    const LETTERS: [&[u8]; 4] = [&[1, 2, 3], &[4], &[5, 6, 7, 8, 9], &[]];
    explore(Some(3), || {
        let (mut writer, mut reader) = ends();
        let sender = thread::spawn(move || {
            for letter in LETTERS {
                let (first, second) = letter.split_at(letter.len() / 2);
                while !writer.push(&[first, second]) {
                    thread::yield_now();
                }
            }
        });
        for letter in LETTERS {
            let arrived = loop {
                match pop(&mut reader) {
                    Some(arrived) => break arrived,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(arrived, letter);
        }
        sender.join().unwrap();
    });
}

#[test]
fn a_full_ring_takes_no_letter_until_one_is_read() {
    explore(None, || {
        let (mut writer, mut reader) = ends();
        assert_eq!(reader.next(), Ok(None));
        // Of 8 + 8 bytes, then of 8 + 16, whose end wraps around.
        assert!(writer.push(&[&[1; 8]]));
        assert!(!writer.push(&[&[2; 9]]));
        assert!(writer.fits(24) && !writer.fits(25));
        assert_eq!((reader.next(), reader.next()), (Ok(Some(8)), Ok(Some(8))), "it stays");
        assert!(!writer.push(&[&[2; 9]]), "until it is taken");
        assert_eq!(pop(&mut reader), Some(vec![1; 8]));
        assert!(writer.push(&[&[3; 9]]));
        assert_eq!(pop(&mut reader), Some(vec![3; 9]));
    });
}

#[test]
fn a_length_that_no_letter_has_is_an_error() {
    explore(None, || {
        let memory = Checked::new();
        // SAFETY: there is no writer, and this is the only reader of new memory.
        let mut reader = unsafe { Reader::new(memory.clone()) };
        let length = (CAPACITY as u64 - 7).to_ne_bytes();
        // SAFETY: no other thread uses the memory.
        unsafe { memory.write(0, &length) };
        memory.store(RingCount::Written, 8, Ordering::Release);
        assert_eq!(reader.next(), Err(CAPACITY as u64 - 7));
    });
}
