//! What the members of communicators send each other: in memory among threads, in files among processes.
use crate::clock::Clock;
use crate::settings;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;

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
}

/// All messages that are not released.
#[derive(Default)]
pub(crate) struct Exchange {
    messages: Mutex<HashMap<String, Arc<Message>>>,
    released: HashMap<String, usize>,
}

fn path(key: &str) -> Option<PathBuf> {
    settings::get().folder.as_ref().map(|folder| folder.join(key))
}

impl Exchange {
    pub(crate) fn put(&self, key: String, head: Head, data: Vec<u8>, clock: Arc<Clock>) {
        if let Some(path) = path(&key) {
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
        let message = Message { name: head.call.to_string(), numbers: head.numbers, site: head.site, data, clock };
        self.messages.lock().insert(key, Arc::new(message));
    }

    pub(crate) fn has(&self, key: &str) -> bool {
        self.messages.lock().contains_key(key) || path(key).is_some_and(|path| path.exists())
    }

    pub(crate) fn get(&self, key: &str) -> Option<Arc<Message>> {
        if let Some(message) = self.messages.lock().get(key) {
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
        let message = Arc::new(Message { name, numbers, site, data: rest.to_vec(), clock: Arc::default() });
        self.messages.lock().insert(key.to_string(), message.clone());
        Some(message)
    }

    /// Forgets messages after `readers` calls with the same `name`.
    pub(crate) fn release(&mut self, name: String, readers: usize, keys: impl IntoIterator<Item = String>) {
        let count = self.released.entry(name.clone()).or_default();
        *count += 1;
        if *count >= readers {
            self.released.remove(&name);
            let mut messages = self.messages.lock();
            for key in keys {
                messages.remove(&key);
            }
        }
    }
}
