//! Named values, their changes, and the waiters for values that are not set.
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;

/// The most bytes of values with their keys. More are refused and not waited for: a rank that waits for room may be the one
/// that would make it.
const MOST_BYTES: usize = 1 << 30;
/// The bytes that a value takes in addition to its content.
const LEAST_BYTES: usize = 256;
/// The most ranks that a refusal names.
const MOST_NAMED: usize = 8;

/// The values that ranks have set.
#[derive(Debug)]
pub(crate) struct Values<W> {
    held: HashMap<String, Setting>,
    waiting: HashMap<String, Vec<W>>,
    /// The bytes of all values, and the most of them.
    bytes: usize,
    most: usize,
}

/// A value, and the rank that has set it.
#[derive(Debug)]
struct Setting {
    bytes: Arc<[u8]>,
    rank: usize,
}

/// The keys of programs begin with this. Values of the library itself are few and small, and always find room: a rank whose value
/// is refused would leave others waiting for it.
pub(crate) const OWN: &str = "own ";

/// Returns the bytes that count for a value.
fn size(key: &str, value: &[u8]) -> usize {
    if key.starts_with(OWN) { key.len() + value.len() + LEAST_BYTES } else { 0 }
}

/// An atomic change of a value.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) enum ValueChange {
    /// Sets the value to the payload.
    Set,
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
pub(crate) enum ChangeOutcome {
    Stored,
    /// Whether there was a value.
    Deleted(bool),
    /// The counter after the addition.
    Sum(i64),
    /// Whether there was a value, which is then the payload.
    Before(bool),
    /// Why the change was refused.
    Refused(String),
}

/// A new value and its waiters.
type News<W> = (Arc<[u8]>, Vec<W>);

/// All effects of a change.
pub(crate) struct ChangeEffects<W> {
    pub(crate) outcome: ChangeOutcome,
    pub(crate) bytes: Arc<[u8]>,
    pub(crate) woken: Option<News<W>>,
}

impl<W> ChangeEffects<W> {
    fn only(outcome: ChangeOutcome) -> Self {
        Self { outcome, bytes: Arc::default(), woken: None }
    }
}

impl<W> Default for Values<W> {
    fn default() -> Self {
        Self { held: HashMap::new(), waiting: HashMap::new(), bytes: 0, most: MOST_BYTES }
    }
}

impl<W> Values<W> {
    /// Sets a value of `rank`, and replaces an existing one. Returns it with its waiters. The error is that there is no room.
    fn store(&mut self, key: String, bytes: &[u8], rank: usize) -> Result<News<W>, String> {
        let before = self.held.get(&key).map_or(0, |held| size(&key, &held.bytes));
        let more = size(&key, bytes);
        let after = self.bytes - before + more;
        if after > self.most && more > before {
            return Err(self.full(more));
        }
        let (bytes, waiting) = (Arc::<[u8]>::from(bytes), self.waiting.remove(&key).unwrap_or_default());
        self.held.insert(key, Setting { bytes: bytes.clone(), rank });
        self.bytes = after;
        Ok((bytes, waiting))
    }

    /// Returns why a value of `more` bytes is refused.
    fn full(&self, more: usize) -> String {
        let of_programs = self.held.iter().filter(|(key, _)| key.starts_with(OWN));
        let of_ranks = of_programs.map(|(key, held)| (held.rank, size(key, &held.bytes)));
        let of_ranks =
            of_ranks.into_grouping_map().fold((0, 0), |(count, bytes), _, more| (count + 1, bytes + more));
        let most_first = of_ranks.into_iter().sorted_by_key(|(rank, (_, bytes))| (usize::MAX - bytes, *rank));
        let shown = most_first.take(MOST_NAMED).map(|(rank, (count, bytes))| {
            let noun = if count == 1 { "value" } else { "values" };
            format!("{} KiB in {count} {noun} of rank {rank}", bytes >> 10)
        });
        format!(
            "a value of {} KiB has no room: the store keeps at most {} KiB, and has {} KiB: {}; delete what is no \
             longer needed (Store::delete)",
            more >> 10,
            self.most >> 10,
            self.bytes >> 10,
            shown.format(", ")
        )
    }

    /// Returns the value, if it is set.
    pub(crate) fn peek(&self, key: &str) -> Option<Arc<[u8]>> {
        self.held.get(key).map(|held| held.bytes.clone())
    }

    /// Returns the value, or registers `who` as a waiter and returns `None`.
    pub(crate) fn get(&mut self, key: String, who: W) -> Option<Arc<[u8]>> {
        let value = self.peek(&key);
        if value.is_none() {
            self.waiting.entry(key).or_default().push(who);
        }
        value
    }

    /// Applies a change of `rank`. One that is refused changes nothing.
    pub(crate) fn change(
        &mut self,
        key: String,
        change: &ValueChange,
        bytes: &[u8],
        rank: usize,
    ) -> ChangeEffects<W> {
        self.changed(key, change, bytes, rank)
            .unwrap_or_else(|why| ChangeEffects::only(ChangeOutcome::Refused(why)))
    }

    fn changed(
        &mut self,
        key: String,
        change: &ValueChange,
        bytes: &[u8],
        rank: usize,
    ) -> Result<ChangeEffects<W>, String> {
        Ok(match *change {
            ValueChange::Set => ChangeEffects {
                woken: Some(self.store(key, bytes, rank)?),
                ..ChangeEffects::only(ChangeOutcome::Stored)
            },
            ValueChange::Delete => {
                let was = self.held.remove(&key);
                self.bytes -= was.as_ref().map_or(0, |was| size(&key, &was.bytes));
                ChangeEffects::only(ChangeOutcome::Deleted(was.is_some()))
            }
            ValueChange::Add(n) => {
                let sum = self.sum(&key, n)?;
                let woken = Some(self.store(key, &sum.to_le_bytes(), rank)?);
                ChangeEffects { woken, ..ChangeEffects::only(ChangeOutcome::Sum(sum)) }
            }
            ValueChange::Swap { expected } => {
                let parts = bytes.split_at_checked(expected.unwrap_or(0));
                let (old, new) = parts.ok_or("the message has fewer bytes than the expected value")?;
                let held = self.peek(&key);
                let is_expected = held.as_deref() == expected.map(|_| old);
                let woken = if is_expected { Some(self.store(key, new, rank)?) } else { None };
                ChangeEffects {
                    outcome: ChangeOutcome::Before(held.is_some()),
                    bytes: held.unwrap_or_default(),
                    woken,
                }
            }
        })
    }

    fn sum(&self, key: &str, n: i64) -> Result<i64, String> {
        let held = match self.peek(key).map(|held| (held.len(), <[u8; 8]>::try_from(&held[..]))) {
            None => 0,
            Some((_, Ok(bytes))) => i64::from_le_bytes(bytes),
            Some((len, Err(_))) => {
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
            assert!(
                values.get(key(), n).is_none() && values.forget(&key(), &n) && !values.forget(&key(), &n)
            );
            assert_eq!(values.change(key(), &ValueChange::Add(2), &[], 0).outcome, ChangeOutcome::Sum(2));
            assert_eq!(
                values.change(key(), &ValueChange::Delete, &[], 0).outcome,
                ChangeOutcome::Deleted(true)
            );
            assert_eq!(
                values.change(key(), &ValueChange::Delete, &[], 0).outcome,
                ChangeOutcome::Deleted(false)
            );
        }
        assert!(values.held.is_empty() && values.waiting.is_empty() && values.bytes == 0);
    }

    #[test]
    fn a_swap_happens_only_where_the_value_is_the_expected_one() {
        let mut values = Values::<u32>::default();
        let key = || "key".to_string();
        assert!(values.get(key(), 7).is_none());
        let mut swap = |expected: Option<&[u8]>, new: &[u8]| {
            let bytes = [expected.unwrap_or_default(), new].concat();
            let changed =
                values.change(key(), &ValueChange::Swap { expected: expected.map(<[u8]>::len) }, &bytes, 0);
            (
                changed.outcome,
                changed.bytes.to_vec(),
                changed.woken.map(|(value, woken)| (value.to_vec(), woken)),
            )
        };
        assert_eq!(
            swap(Some(b""), b"a"),
            (ChangeOutcome::Before(false), vec![], None),
            "no value is not an empty one"
        );
        assert_eq!(swap(None, b""), (ChangeOutcome::Before(false), vec![], Some((vec![], vec![7]))));
        assert_eq!(swap(None, b"b"), (ChangeOutcome::Before(true), vec![], None));
        assert_eq!(
            swap(Some(b""), b"cd"),
            (ChangeOutcome::Before(true), vec![], Some((b"cd".to_vec(), vec![])))
        );
        assert_eq!(swap(Some(b"c"), b"e"), (ChangeOutcome::Before(true), b"cd".to_vec(), None));
        assert!(
            matches!(values.change(key(), &ValueChange::Add(1), &[], 0).outcome, ChangeOutcome::Refused(why) if why.contains("2 bytes"))
        );
        let lie = values.change(key(), &ValueChange::Swap { expected: Some(9) }, b"short", 0);
        assert!(matches!(lie.outcome, ChangeOutcome::Refused(_)));
    }

    #[test]
    fn counters_do_not_overflow() {
        let mut values = Values::<u32>::default();
        let mut add = |n| values.change("key".to_string(), &ValueChange::Add(n), &[], 0).outcome;
        assert_eq!(add(i64::MAX), ChangeOutcome::Sum(i64::MAX));
        assert!(matches!(add(1), ChangeOutcome::Refused(_)));
        assert_eq!(add(-1), ChangeOutcome::Sum(i64::MAX - 1));
    }

    #[test]
    fn values_have_a_limit_and_a_refusal_names_who_holds_them() {
        let mut values = Values::<u32> { most: 5000, ..Values::default() };
        let mut change = |key: &str, change: &ValueChange, bytes: &[u8], rank| {
            values.change(format!("{OWN}{key}"), change, bytes, rank).outcome
        };
        // Each takes its 700 bytes, 5 of its key and 256 more.
        for (key, rank) in [("a", 2), ("b", 2), ("c", 1), ("d", 1), ("e", 1)] {
            assert_eq!(change(key, &ValueChange::Set, &[7; 700], rank), ChangeOutcome::Stored);
        }
        let ChangeOutcome::Refused(why) = change("f", &ValueChange::Set, &[7; 700], 0) else {
            panic!("it is full")
        };
        for part in [
            "at most 4 KiB, and has 4 KiB: 2 KiB in 3 values of rank 1, 1 KiB in 2 values of rank 2",
            "delete",
        ] {
            assert!(why.contains(part), "{why}");
        }
        let swap = ValueChange::Swap { expected: None };
        assert!(matches!(change("f", &swap, &[7; 700], 0), ChangeOutcome::Refused(_)), "by any way");
        assert!(
            matches!(change("a", &ValueChange::Set, &[7; 1000], 0), ChangeOutcome::Refused(_)),
            "nor may one grow"
        );
        assert_eq!(change("a", &swap, &[], 0), ChangeOutcome::Before(true), "nothing changes");
        // What takes no more is stored, and room comes back.
        assert_eq!(change("a", &ValueChange::Set, &[8; 700], 0), ChangeOutcome::Stored);
        assert!(
            matches!(change("n", &ValueChange::Add(1), &[], 0), ChangeOutcome::Refused(_)),
            "counters count, too"
        );
        assert_eq!(change("b", &ValueChange::Delete, &[], 0), ChangeOutcome::Deleted(true));
        assert_eq!(change("f", &ValueChange::Set, &[7; 700], 0), ChangeOutcome::Stored);
    }
}
