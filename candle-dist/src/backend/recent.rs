//! A short memory of values that programs use again and again, in about the same order.
use std::sync::Arc;

/// The most values that are kept.
const MOST: usize = 256;

/// The last values, in the order in which they were first used.
pub(super) struct Recent<T> {
    kept: Vec<Arc<T>>,
    /// The index after the last value: the next one is likely the one that followed before.
    next: usize,
}

impl<T> Default for Recent<T> {
    fn default() -> Self {
        Self { kept: Vec::new(), next: 0 }
    }
}

impl<T> Recent<T> {
    /// Returns the value that `fits`, if it is kept.
    pub(super) fn find(&mut self, fits: impl Fn(&T) -> bool) -> Option<Arc<T>> {
        let next = self.next.min(self.kept.len());
        let (before, after) = self.kept.split_at(next);
        let mut likely = after.iter().chain(before).enumerate();
        let (distance, kept) = likely.find(|(_, kept)| fits(kept))?;
        self.next = (next + distance) % self.kept.len() + 1;
        Some(kept.clone())
    }

    /// Keeps a new value, and returns it.
    pub(super) fn keep(&mut self, value: Arc<T>) -> Arc<T> {
        let next = match self.kept.len() {
            MOST => self.next % MOST,
            len => self.next.min(len),
        };
        if self.kept.len() == MOST {
            self.kept[next] = value.clone();
        } else {
            self.kept.insert(next, value.clone());
        }
        self.next = next + 1;
        value
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;

    #[test]
    fn values_are_found_in_any_order_and_no_more_are_kept_than_the_limit() {
        let mut recent = Recent::default();
        for value in 1..=3 * MOST {
            assert!(recent.find(|&kept| kept == value).is_none());
            assert_eq!(*recent.keep(Arc::new(value)), value);
        }
        assert_eq!(recent.kept.len(), MOST);
        for order in [1, 7, 5] {
            for nth in 0..MOST {
                let value = 2 * MOST + 1 + nth * order % MOST;
                assert_eq!(*recent.find(|&kept| kept == value).unwrap(), value);
            }
        }
    }
}
