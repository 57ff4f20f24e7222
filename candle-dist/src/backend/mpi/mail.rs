//! Messages that have come and that nobody has taken.
use super::header::{Header, Slot};
use candle_core::CpuStorage;
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

/// The messages by group, sender (as a rank of the world) and place, the oldest of each first; no queue is empty.
#[derive(Default)]
pub(super) struct Mail(HashMap<(u64, usize, Slot), VecDeque<(Header, CpuStorage)>>);

impl Mail {
    pub(super) fn put(&mut self, from: usize, header: Header, data: CpuStorage) {
        self.0.entry((header.group, from, header.slot)).or_default().push_back((header, data));
    }

    /// The oldest message of that group, sender and place, if there is one.
    pub(super) fn take(&mut self, group: u64, from: usize, slot: Slot) -> Option<(Header, CpuStorage)> {
        let Entry::Occupied(mut queue) = self.0.entry((group, from, slot)) else { return None };
        let message = queue.get_mut().pop_front();
        if queue.get().is_empty() {
            queue.remove();
        }
        message
    }
}
