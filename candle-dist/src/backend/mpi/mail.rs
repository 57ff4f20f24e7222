//! Messages that have arrived and are not matched yet.
use super::header::{MessageHeader, MessageSlot};
use rustc_hash::FxHashMap;
use std::collections::VecDeque;
use std::collections::hash_map::Entry;

/// One message: its header, and its data if that was sent along.
#[derive(Debug)]
pub(super) struct Letter {
    /// The sender, as a rank of the world.
    pub(super) from: usize,
    pub(super) header: MessageHeader,
    pub(super) data: Vec<u8>,
}

/// The address of a point-to-point message: group, sender as a rank of the world, and tag.
pub(super) type MessageKey = (u64, usize, u32);

/// The messages, oldest first at each address; no queue is empty.
#[derive(Debug, Default)]
pub(super) struct Mail {
    /// Messages of collectives that this rank has not entered: by group and number.
    rounds: FxHashMap<(u64, u64), Vec<Letter>>,
    /// Point-to-point messages.
    messages: FxHashMap<MessageKey, VecDeque<Letter>>,
}

impl Mail {
    pub(super) fn put(&mut self, letter: Letter) {
        let MessageHeader { group, slot, .. } = letter.header;
        match slot {
            MessageSlot::Round { number, .. } => self.rounds.entry((group, number)).or_default().push(letter),
            MessageSlot::Tag(tag) => {
                self.messages.entry((group, letter.from, tag)).or_default().push_back(letter);
            }
        }
    }

    /// Takes all arrived messages of a collective.
    pub(super) fn take_round(&mut self, group: u64, number: u64) -> Vec<Letter> {
        match self.rounds.is_empty() {
            true => Vec::new(),
            false => self.rounds.remove(&(group, number)).unwrap_or_default(),
        }
    }

    /// Takes a message that nobody has asked for, if there is one.
    pub(super) fn take_any(&mut self) -> Option<Letter> {
        if let Some(&address) = self.messages.keys().next() {
            return self.take_message(address);
        }
        let &round = self.rounds.keys().next()?;
        let Entry::Occupied(mut letters) = self.rounds.entry(round) else { return None };
        let letter = letters.get_mut().pop();
        if letters.get().is_empty() {
            letters.remove();
        }
        letter
    }

    /// Returns whether there is a message at `address`.
    pub(super) fn has_message(&self, address: MessageKey) -> bool {
        self.messages.contains_key(&address)
    }

    /// Takes the oldest message at `address`, if there is one.
    pub(super) fn take_message(&mut self, address: MessageKey) -> Option<Letter> {
        let Entry::Occupied(mut queue) = self.messages.entry(address) else { return None };
        let letter = queue.get_mut().pop_front();
        if queue.get().is_empty() {
            queue.remove();
        }
        letter
    }
}
