//! Whether a forward pass runs within a backward pass, and how deep backward passes are nested.
use crate::scoped;
use std::cell::Cell;

thread_local! {
    static RECOMPUTING: Cell<bool> = const { Cell::new(false) };
    /// The nesting depth of backward passes.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// Runs a forward pass within the backward pass that needs it.
pub(crate) fn recomputing<T>(f: impl FnOnce() -> T) -> T {
    scoped::with(&RECOMPUTING, true, f)
}

/// Returns whether this is a forward pass within the backward pass.
pub(crate) fn is_recomputing() -> bool {
    RECOMPUTING.get()
}

/// Runs the backward pass of a segment within that of the graph that contains the segment as a node.
pub(crate) fn nested<T>(f: impl FnOnce() -> T) -> T {
    scoped::with(&DEPTH, DEPTH.get() + 1, f)
}

/// Returns the nesting depth of backward passes.
pub(crate) fn depth() -> usize {
    DEPTH.get()
}

/// Clears the state of a failed pass.
pub(super) fn reset() {
    RECOMPUTING.set(false);
    DEPTH.set(0);
}
