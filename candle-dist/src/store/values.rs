//! Values by name, and who waits for one that is not there yet.
use std::collections::HashMap;
use std::sync::Arc;

/// The values that ranks have set.
#[derive(Debug)]
pub(crate) struct Values<W> {
    held: HashMap<String, Arc<[u8]>>,
    waiting: HashMap<String, Vec<W>>,
}

impl<W> Default for Values<W> {
    fn default() -> Self {
        Self { held: HashMap::new(), waiting: HashMap::new() }
    }
}

impl<W> Values<W> {
    /// Sets a value in place of any other, and returns who waited for it.
    pub(crate) fn set(&mut self, key: String, value: Arc<[u8]>) -> Vec<W> {
        let waiting = self.waiting.remove(&key).unwrap_or_default();
        self.held.insert(key, value);
        waiting
    }

    /// The value, or `None` and `who` waits for it.
    pub(crate) fn get(&mut self, key: String, who: W) -> Option<Arc<[u8]>> {
        let value = self.held.get(&key).cloned();
        if value.is_none() {
            self.waiting.entry(key).or_default().push(who);
        }
        value
    }
}
