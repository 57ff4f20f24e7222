//! What the members of communicators send each other: in memory among threads, in files among processes.
use crate::clock::Clock;
use crate::settings;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fmt;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

/// What a message is.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum Topic {
    /// A member joins the communicator.
    Join,
    /// A member's part of a collective.
    Part,
    /// A message from one member to another.
    Sent,
    /// A member waits for a message of another.
    Awaited,
    /// A member connects for an algorithm.
    Algorithm,
    /// A member connects to send to another.
    Sender,
    /// A member connects to receive from another.
    Receiver,
}

/// The name of a message: unique among all communicators and calls.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Key {
    pub(crate) comm: u64,
    pub(crate) topic: Topic,
    /// The number of the call among those with which it is matched.
    pub(crate) number: u64,
    /// The member, or the sender and the receiver.
    pub(crate) ends: [usize; 2],
}

impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { comm, topic, number, ends: [from, to] } = self;
        write!(f, "{comm:016x}-{topic:?}-{number}-{from}-{to}")
    }
}

/// A call as its rank made it. Members of a communicator must agree on all of it.
#[derive(Clone, Debug, PartialEq, Eq, Default)]
pub(crate) struct Head {
    pub(crate) call: &'static str,
    pub(crate) numbers: [u64; 4],
    pub(crate) site: String,
}

/// One message.
#[derive(Debug, Default)]
pub(crate) struct Message {
    pub(crate) name: String,
    pub(crate) numbers: [u64; 4],
    pub(crate) site: String,
    pub(crate) data: Vec<u8>,
    pub(crate) clock: Arc<Clock>,
    /// When its sender came to the call on the timeline. Other processes have timelines of their own.
    pub(crate) at: f64,
}

/// All messages that are not released.
#[derive(Default)]
pub(crate) struct Exchange {
    messages: Mutex<HashMap<Key, Arc<Message>>>,
    /// How many of their readers have used the messages of a call, by the key of the first.
    released: HashMap<Key, usize>,
}

fn path(key: Key) -> Option<PathBuf> {
    settings::get().folder.as_ref().map(|folder| folder.join(key.to_string()))
}

impl Exchange {
    pub(crate) fn put(&self, key: Key, head: Head, data: Vec<u8>, (clock, at): (Arc<Clock>, f64)) {
        if let Some(path) = path(key) {
            let mut bytes: Vec<u8> = head.numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
            for text in [head.call, &head.site] {
                bytes.extend((text.len() as u64).to_le_bytes());
                bytes.extend(text.as_bytes());
            }
            bytes.extend(&data);
            // A rename is atomic, so readers see whole files only.
            let part = path.with_extension("part");
            if let Err(error) = fs::write(&part, bytes).and_then(|()| fs::rename(&part, &path)) {
                crate::report::die(&format!("{}: {error}", path.display()));
            }
        }
        let message =
            Message { name: head.call.to_string(), numbers: head.numbers, site: head.site, data, clock, at };
        self.messages.lock().insert(key, Arc::new(message));
    }

    pub(crate) fn has(&self, key: Key) -> bool {
        self.messages.lock().contains_key(&key) || path(key).is_some_and(|path| path.exists())
    }

    pub(crate) fn get(&self, key: Key) -> Option<Arc<Message>> {
        if let Some(message) = self.messages.lock().get(&key) {
            return Some(message.clone());
        }
        let bytes = fs::read(path(key)?).ok()?;
        let mut rest = &bytes[..];
        let mut take = |len: usize| {
            let (head, tail) = rest.split_at_checked(len)?;
            rest = tail;
            Some(head)
        };
        let mut number = || Some(u64::from_le_bytes(take(8)?.try_into().ok()?));
        let numbers = [number()?, number()?, number()?, number()?];
        let mut text = || {
            let len = u64::from_le_bytes(take(8)?.try_into().ok()?) as usize;
            Some(String::from_utf8_lossy(take(len)?).into_owned())
        };
        let (name, site) = (text()?, text()?);
        let message =
            Arc::new(Message { name, numbers, site, data: rest.to_vec(), clock: Arc::default(), at: 0.0 });
        self.messages.lock().insert(key, message.clone());
        Some(message)
    }

    /// Forgets all messages, unless other processes may still need them.
    pub(crate) fn forget(&mut self) {
        if settings::get().folder.is_none() {
            self.messages.lock().clear();
            self.released.clear();
        }
    }

    /// Forgets the messages of a call after as many calls as it has keys. All use the same keys. Other processes make
    /// theirs elsewhere.
    pub(crate) fn release(&mut self, keys: &[Key]) {
        let Some(&first) = keys.first() else { return };
        let count = self.released.entry(first).or_default();
        *count += 1;
        if *count >= keys.len() || settings::get().folder.is_some() {
            self.released.remove(&first);
            let mut messages = self.messages.lock();
            for key in keys {
                messages.remove(key);
            }
        }
    }
}
