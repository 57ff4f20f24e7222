//! Hardware queues: in which order a device is given its work.
//!
//! CUDA has few connections to a device (CUDA C++ Programming Guide, "Environment Variables",
//! `CUDA_DEVICE_MAX_CONNECTIONS`), and deals the streams to them; streams of another priority have others. A queue gives
//! its work to the device in the order of the calls. What waits for an event, or for the end of the work before it on its
//! stream, waits at the head of its queue, and whatever other streams have put behind it waits too. Copies have
//! engines of their own, with the events that mark their end, and take no queue.
use crate::clock::Mark;
use std::collections::{HashMap, VecDeque};

/// A hardware queue: its device, the priority of its streams, and its number.
pub(crate) type HardwareQueue = (usize, i32, usize);

enum Entry {
    /// The next operation of a stream.
    Stream(u64),
    /// A stream of NCCL's that waits for a kernel.
    Wait(Mark),
}

/// The hardware queues of all devices.
#[derive(Default)]
pub(super) struct HardwareQueues {
    entries: HashMap<HardwareQueue, VecDeque<Entry>>,
    /// How many streams of a device and priority were dealt.
    dealt: HashMap<(usize, i32), usize>,
}

impl HardwareQueues {
    /// Returns the queue of the next stream of a device, one of `count`.
    pub(super) fn deal(&mut self, device: usize, priority: i32, count: usize) -> HardwareQueue {
        let dealt = self.dealt.entry((device, priority)).or_default();
        *dealt += 1;
        (device, priority, (*dealt - 1) % count.max(1))
    }

    fn push(&mut self, queue: HardwareQueue, entry: Entry) {
        let entries = self.entries.entry(queue).or_default();
        while matches!(entries.front(), Some(Entry::Wait(mark)) if mark.is_passed()) {
            entries.pop_front();
        }
        entries.push_back(entry);
    }

    /// Puts an operation of a stream into its queue.
    pub(super) fn add(&mut self, queue: HardwareQueue, stream: u64) {
        self.push(queue, Entry::Stream(stream));
    }

    /// Lets a queue wait for a point.
    pub(super) fn park(&mut self, queue: HardwareQueue, mark: Mark) {
        if !mark.is_passed() {
            self.push(queue, Entry::Wait(mark));
        }
    }

    /// Returns the stream whose operation is at the head of a queue.
    pub(super) fn head(&self, queue: HardwareQueue) -> Option<u64> {
        let is_there = |entry: &&Entry| !matches!(entry, Entry::Wait(mark) if mark.is_passed());
        match self.entries.get(&queue)?.iter().find(is_there)? {
            Entry::Stream(stream) => Some(*stream),
            Entry::Wait(_) => None,
        }
    }

    /// The device takes the operation at the head of a queue.
    pub(super) fn take(&mut self, queue: HardwareQueue) {
        let Some(entries) = self.entries.get_mut(&queue) else { return };
        while let Some(Entry::Wait(_)) = entries.pop_front() {}
    }
}
