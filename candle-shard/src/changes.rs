//! Counts possible changes of parameters, for holders of copies.
use std::cell::Cell;

thread_local! {
    static CHANGES: Cell<u64> = const { Cell::new(0) };
}

/// Records that parameters may have changed.
pub(crate) fn parameters_change() {
    CHANGES.set(CHANGES.get().wrapping_add(1));
}

/// Returns the number of times that parameters may have changed on this thread.
pub(crate) fn changes() -> u64 {
    CHANGES.get()
}
