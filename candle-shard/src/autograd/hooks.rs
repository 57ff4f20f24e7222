//! Hooks by which rooms above take part in backward passes; those rooms register them.
use crate::Result;
use candle_core::backprop::GradStore;
use std::cell::RefCell;

/// The part of a room in the backward passes of one thread.
pub(crate) struct Hooks {
    /// Called in the pass that is at this place, before a nested pass runs anything.
    pub(crate) nested_begins: fn(Option<usize>) -> Result<()>,
    /// Called when a nested pass has visited all its nodes.
    pub(crate) nested_ended: fn() -> Result<()>,
    /// Called when the outermost pass has visited all its nodes, before gradients that are off the graph are
    /// added to its own.
    pub(crate) ended: fn(&mut GradStore) -> Result<()>,
    /// Called after a failed pass: drops what earlier passes have left for it.
    pub(crate) failed: fn(),
    /// Called at the start of a pass and after a failed pass: drops the state of the failed one.
    pub(crate) abandoned: fn(),
}

thread_local! {
    /// The hooks of this thread, in the order in which they were registered.
    static HOOKS: RefCell<Vec<&'static Hooks>> = const { RefCell::new(Vec::new()) };
}

/// Registers hooks for the passes of this thread; registering them again changes nothing.
pub(crate) fn register(hooks: &'static Hooks) {
    HOOKS.with_borrow_mut(|all| {
        if !all.iter().any(|known| std::ptr::eq(*known, hooks)) {
            all.push(hooks);
        }
    });
}

/// Returns the hooks; a copy, because hooks run code that may register others.
fn all() -> Vec<&'static Hooks> {
    HOOKS.with_borrow(Vec::clone)
}

pub(crate) fn nested_begins(at: Option<usize>) -> Result<()> {
    all().into_iter().try_for_each(|hooks| (hooks.nested_begins)(at))
}

pub(super) fn nested_ended() -> Result<()> {
    all().into_iter().try_for_each(|hooks| (hooks.nested_ended)())
}

pub(super) fn ended(grads: &mut GradStore) -> Result<()> {
    all().into_iter().try_for_each(|hooks| (hooks.ended)(grads))
}

pub(super) fn failed() {
    all().into_iter().for_each(|hooks| (hooks.failed)());
}

pub(super) fn abandoned() {
    all().into_iter().for_each(|hooks| (hooks.abandoned)());
}
