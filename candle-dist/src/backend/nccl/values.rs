//! Named values that threads exchange.
use crate::Cause;
use parking_lot::{Condvar, Mutex};
use std::collections::HashMap;
use std::time::Duration;

/// How often a waiting thread checks whether it still has to wait.
const TICK: Duration = Duration::from_millis(20);

/// The values that the threads of a world exchange.
#[derive(Debug, Default)]
pub(crate) struct ThreadValues {
    known: Mutex<HashMap<String, Vec<u8>>>,
    changed: Condvar,
}

impl ThreadValues {
    /// Sets the value of `key` for all threads.
    pub(super) fn set(&self, key: &str, value: &[u8]) {
        self.known.lock().insert(key.to_string(), value.to_vec());
        self.changed.notify_all();
    }

    /// Returns the value of `key`. Waits until it is set, or until `in_vain` returns why it never will be.
    pub(super) fn get(&self, key: &str, in_vain: impl Fn() -> Option<Cause>) -> Result<Vec<u8>, Cause> {
        let mut known = self.known.lock();
        loop {
            // A rank may set the value just before it ends, so check its end first and then the value.
            let why = in_vain();
            if let Some(value) = known.get(key) {
                return Ok(value.clone());
            }
            if let Some(cause) = why {
                return Err(cause);
            }
            self.changed.wait_for(&mut known, TICK);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_value_comes_to_who_waits_for_it() {
        let values = ThreadValues::default();
        let found = std::thread::scope(|scope| {
            let waiting = scope.spawn(|| values.get("id", || None));
            values.set("other", &[0]);
            values.set("id", &[1, 2]);
            waiting.join().expect("no panic")
        });
        assert_eq!(found, Ok(vec![1, 2]));
    }

    #[test]
    fn waiting_ends_when_it_is_in_vain_and_not_before_the_value_was_looked_at() {
        let (values, gone) = (ThreadValues::default(), || Some(Cause::Returned { rank: 3 }));
        assert_eq!(values.get("id", gone), Err(Cause::Returned { rank: 3 }));
        values.set("id", &[7]);
        assert_eq!(values.get("id", gone), Ok(vec![7]));
    }
}
