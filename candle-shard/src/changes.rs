//! How often parameters may have changed, for those who keep copies of them.
use std::cell::Cell;

thread_local! {
    static CHANGES: Cell<u64> = const { Cell::new(0) };
}

/// Notes that parameters may have changed.
pub(crate) fn parameters_change() {
    CHANGES.set(CHANGES.get().wrapping_add(1));
}

/// How often parameters may have changed on this thread.
pub(crate) fn changes() -> u64 {
    CHANGES.get()
}
