//! Messages that have come and that nobody has taken.
use super::header::{Header, Slot};
use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};

/// One message: its header, and its data if that came along.
#[derive(Debug)]
pub(super) struct Letter {
    /// The sender, as a rank of the world.
    pub(super) from: usize,
    pub(super) header: Header,
    pub(super) data: Vec<u8>,
}

/// The messages, the oldest of each place first; no queue is empty.
#[derive(Debug, Default)]
pub(super) struct Mail {
    /// Of collectives that this rank has not entered: by group and number.
    rounds: HashMap<(u64, u64), Vec<Letter>>,
    /// From one rank to another: by group, sender and tag.
    messages: HashMap<(u64, usize, u32), VecDeque<Letter>>,
}

impl Mail {
    pub(super) fn put(&mut self, letter: Letter) {
        let Header { group, slot, .. } = letter.header;
        match slot {
            Slot::Round { number, .. } => self.rounds.entry((group, number)).or_default().push(letter),
            Slot::Tag(tag) => self.messages.entry((group, letter.from, tag)).or_default().push_back(letter),
        }
    }

    /// All that has come of a collective.
    pub(super) fn take_round(&mut self, group: u64, number: u64) -> Vec<Letter> {
        self.rounds.remove(&(group, number)).unwrap_or_default()
    }

    /// The oldest message of that group, sender and tag, if there is one.
    pub(super) fn take_message(&mut self, group: u64, from: usize, tag: u32) -> Option<Letter> {
        let Entry::Occupied(mut queue) = self.messages.entry((group, from, tag)) else { return None };
        let letter = queue.get_mut().pop_front();
        if queue.get().is_empty() {
            queue.remove();
        }
        letter
    }
}
