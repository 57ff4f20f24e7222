//! Named values, their changes, and the waiters for values that are not set.
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// The values that ranks have set.
#[derive(Debug)]
pub(crate) struct Values<W> {
    held: HashMap<String, Arc<[u8]>>,
    waiting: HashMap<String, Vec<W>>,
}

/// An atomic change of a value.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum Change {
    Delete,
    /// Adds to a counter, which starts at 0.
    Add(i64),
    /// Sets the value if it is the expected one. The payload holds the expected value, if any, and then the new one.
    Swap {
        expected: Option<usize>,
    },
}

/// The outcome of a change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Outcome {
    /// Whether there was a value.
    Deleted(bool),
    /// The counter after the addition.
    Sum(i64),
    /// Whether there was a value, which is then the payload.
    Before(bool),
    /// Why the change was refused.
    Refused(String),
}

/// All effects of a change.
pub(crate) struct Changed<W> {
    pub(crate) outcome: Outcome,
    pub(crate) bytes: Arc<[u8]>,
    /// A new value and its waiters.
    pub(crate) woken: Option<(Arc<[u8]>, Vec<W>)>,
}

impl<W> Default for Values<W> {
    fn default() -> Self {
        Self { held: HashMap::new(), waiting: HashMap::new() }
    }
}

impl<W> Values<W> {
    /// Sets a value, replaces an existing one, and returns its waiters.
    pub(crate) fn set(&mut self, key: String, value: Arc<[u8]>) -> Vec<W> {
        let waiting = self.waiting.remove(&key).unwrap_or_default();
        self.held.insert(key, value);
        waiting
    }

    /// Returns the value, if it is set.
    pub(crate) fn peek(&self, key: &str) -> Option<Arc<[u8]>> {
        self.held.get(key).cloned()
    }

    /// Returns the value, or registers `who` as a waiter and returns `None`.
    pub(crate) fn get(&mut self, key: String, who: W) -> Option<Arc<[u8]>> {
        let value = self.peek(&key);
        if value.is_none() {
            self.waiting.entry(key).or_default().push(who);
        }
        value
    }

    /// Applies a change.
    pub(crate) fn change(&mut self, key: String, change: &Change, bytes: &[u8]) -> Changed<W> {
        let only = |outcome| Changed { outcome, bytes: Arc::default(), woken: None };
        match *change {
            Change::Delete => only(Outcome::Deleted(self.held.remove(&key).is_some())),
            Change::Add(n) => match self.sum(&key, n) {
                Ok(sum) => {
                    let value: Arc<[u8]> = sum.to_le_bytes().into();
                    let waiting = self.set(key, value.clone());
                    Changed { woken: Some((value, waiting)), ..only(Outcome::Sum(sum)) }
                }
                Err(why) => only(Outcome::Refused(why)),
            },
            Change::Swap { expected } => {
                let Some((old, new)) = bytes.split_at_checked(expected.unwrap_or(0)) else {
                    return only(Outcome::Refused("the message has fewer bytes than the expected value".to_string()));
                };
                let held = self.peek(&key);
                let woken = (held.as_deref() == expected.map(|_| old)).then(|| {
                    let value: Arc<[u8]> = new.into();
                    (value.clone(), self.set(key, value))
                });
                let outcome = Outcome::Before(held.is_some());
                Changed { outcome, bytes: held.unwrap_or_default(), woken }
            }
        }
    }

    fn sum(&self, key: &str, n: i64) -> Result<i64, String> {
        let held = match self.held.get(key).map(|held| <[u8; 8]>::try_from(&held[..])) {
            None => 0,
            Some(Ok(bytes)) => i64::from_le_bytes(bytes),
            Some(Err(_)) => {
                let len = self.held.get(key).map_or(0, |held| held.len());
                return Err(format!(
                    "the value of {key:?} is {len} bytes, not a counter; use separate keys for counters"
                ));
            }
        };
        held.checked_add(n).ok_or_else(|| format!("{key:?} is {held}, to which {n} cannot be added"))
    }
}

impl<W: PartialEq> Values<W> {
    /// Removes the waiter `who`. Returns whether it was waiting.
    pub(crate) fn forget(&mut self, key: &str, who: &W) -> bool {
        let Entry::Occupied(mut waiting) = self.waiting.entry(key.to_string()) else { return false };
        let before = waiting.get().len();
        waiting.get_mut().retain(|other| other != who);
        let has_waited = waiting.get().len() < before;
        if waiting.get().is_empty() {
            waiting.remove();
        }
        has_waited
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn changes_leave_nothing_behind() {
        let mut values = Values::<u32>::default();
        for n in 0..1000u32 {
            let key = || format!("of {n}");
            assert!(values.get(key(), n).is_none() && values.forget(&key(), &n) && !values.forget(&key(), &n));
            assert_eq!(values.change(key(), &Change::Add(2), &[]).outcome, Outcome::Sum(2));
            assert_eq!(values.change(key(), &Change::Delete, &[]).outcome, Outcome::Deleted(true));
            assert_eq!(values.change(key(), &Change::Delete, &[]).outcome, Outcome::Deleted(false));
        }
        assert!(values.held.is_empty() && values.waiting.is_empty());
    }

    #[test]
    fn a_swap_happens_only_where_the_value_is_the_expected_one() {
        let mut values = Values::<u32>::default();
        let key = || "key".to_string();
        assert!(values.get(key(), 7).is_none());
        let mut swap = |expected: Option<&[u8]>, new: &[u8]| {
            let bytes = [expected.unwrap_or_default(), new].concat();
            let changed = values.change(key(), &Change::Swap { expected: expected.map(<[u8]>::len) }, &bytes);
            (changed.outcome, changed.bytes.to_vec(), changed.woken.map(|(value, woken)| (value.to_vec(), woken)))
        };
        assert_eq!(swap(Some(b""), b"a"), (Outcome::Before(false), vec![], None), "no value is not an empty one");
        assert_eq!(swap(None, b""), (Outcome::Before(false), vec![], Some((vec![], vec![7]))));
        assert_eq!(swap(None, b"b"), (Outcome::Before(true), vec![], None));
        assert_eq!(swap(Some(b""), b"cd"), (Outcome::Before(true), vec![], Some((b"cd".to_vec(), vec![]))));
        assert_eq!(swap(Some(b"c"), b"e"), (Outcome::Before(true), b"cd".to_vec(), None));
        assert!(
            matches!(values.change(key(), &Change::Add(1), &[]).outcome, Outcome::Refused(why) if why.contains("2 bytes"))
        );
        let lie = values.change(key(), &Change::Swap { expected: Some(9) }, b"short");
        assert!(matches!(lie.outcome, Outcome::Refused(_)));
    }

    #[test]
    fn counters_do_not_overflow() {
        let mut values = Values::<u32>::default();
        let mut add = |n| values.change("key".to_string(), &Change::Add(n), &[]).outcome;
        assert_eq!(add(i64::MAX), Outcome::Sum(i64::MAX));
        assert!(matches!(add(1), Outcome::Refused(_)));
        assert_eq!(add(-1), Outcome::Sum(i64::MAX - 1));
    }
}
