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
use ring::{Count, Memory, Reader, Writer};

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

    fn count(&self, which: Count) -> &AtomicU64 {
        if which == Count::Written { &self.written } else { &self.read }
    }
}

impl Memory for Arc<Checked> {
    fn capacity(&self) -> usize {
        CAPACITY
    }

    fn load(&self, count: Count, order: Ordering) -> u64 {
        self.count(count).load(order)
    }

    fn store(&self, count: Count, value: u64, order: Ordering) {
        self.count(count).store(value, order);
    }

    unsafe fn write(&self, at: usize, bytes: &[u8]) {
        for (cell, byte) in self.bytes[at..at + bytes.len()].iter().zip(bytes) {
            // SAFETY: loom tracks the access, and fails the test if another access is concurrent.
            cell.with_mut(|cell| unsafe { *cell = *byte });
        }
    }

    unsafe fn read(&self, at: usize, bytes: &mut [u8]) {
        for (cell, byte) in self.bytes[at..at + bytes.len()].iter().zip(bytes) {
            // SAFETY: as in `write`.
            *byte = cell.with(|cell| unsafe { *cell });
        }
    }
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
        let mut room = [0; 8];
        for letter in LETTERS {
            let len = loop {
                match reader.pop(&mut room).unwrap() {
                    Some(len) => break len,
                    None => thread::yield_now(),
                }
            };
            assert_eq!(&room[..len], letter);
        }
        sender.join().unwrap();
    });
}

#[test]
fn a_full_ring_takes_no_letter_until_one_is_read() {
    explore(None, || {
        let (mut writer, mut reader) = ends();
        let mut room = [0; 8];
        assert_eq!(reader.pop(&mut room), Ok(None));
        // Of 8 + 8 bytes, then of 8 + 16, whose end wraps around.
        assert!(writer.push(&[&[1; 8]]));
        assert!(!writer.push(&[&[2; 9]]));
        assert!(writer.fits(24) && !writer.fits(25));
        assert_eq!(reader.pop(&mut room), Ok(Some(8)));
        assert!(writer.push(&[&[3; 9]]));
        assert_eq!(reader.pop(&mut room), Err(9), "a letter that is longer than its room stays");
        let mut room = [0; 9];
        assert_eq!(reader.pop(&mut room), Ok(Some(9)));
        assert_eq!(room, [3; 9]);
    });
}
