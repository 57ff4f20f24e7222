//! Counters of this thread, for holders of copies and for layers that draw random numbers.
use std::cell::Cell;
use std::thread::LocalKey;

thread_local! {
    /// The number of times that parameters may have changed.
    static CHANGES: Cell<u64> = const { Cell::new(0) };
    /// The number of outermost backward passes that have ended.
    static PASSES: Cell<u64> = const { Cell::new(0) };
    /// The number of segments made that will be recomputed.
    static SEGMENTS: Cell<u64> = const { Cell::new(0) };
}

fn count(counter: &'static LocalKey<Cell<u64>>) {
    counter.set(counter.get().wrapping_add(1));
}

/// Records that parameters may have changed.
pub(crate) fn parameters_change() {
    count(&CHANGES);
}

/// Returns the number of times that parameters may have changed on this thread.
pub(crate) fn changes() -> u64 {
    CHANGES.get()
}

/// Records that a backward pass has ended.
pub(super) fn pass_ended() {
    count(&PASSES);
}

/// Returns the number of backward passes that have ended on this thread.
pub(crate) fn passes() -> u64 {
    PASSES.get()
}

/// Records that a segment was made that will be recomputed.
pub(crate) fn segment_made() {
    count(&SEGMENTS);
}

/// Returns the number of such segments made so far.
pub(crate) fn segments() -> u64 {
    SEGMENTS.get()
}
