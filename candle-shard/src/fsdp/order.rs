//! How far a backward pass has come: the order in which candle visits the nodes of a graph.
use candle_core::{Tensor, TensorId};
use rustc_hash::FxHashMap;
use std::cell::{Cell, RefCell};
use std::hash::{Hash, Hasher};

thread_local! {
    /// The backward passes under way on this thread, each within a node of the one before.
    static PASSES: RefCell<Vec<Pass>> = const { RefCell::new(Vec::new()) };
    static NEXT: Cell<u64> = const { Cell::new(0) };
    /// Whether this thread has run units, which alone ask for the order.
    static ASKED: Cell<bool> = const { Cell::new(false) };
}

/// A backward pass: where each node comes, and when the node at each place was made.
struct Pass {
    number: u64,
    places: FxHashMap<TensorId, usize>,
    made: Vec<u64>,
}

/// The nodes that were made from one moment to another, by candle's numbers.
#[derive(Clone, Copy, Debug)]
pub(super) struct Span {
    from: u64,
    to: u64,
}

/// The last node of a span in a pass.
#[derive(Clone, Copy, Debug)]
pub(super) struct Last {
    pass: u64,
    place: usize,
}

impl Span {
    /// What `f` makes, and the span of the nodes that it made.
    pub(super) fn of<T>(f: impl FnOnce() -> T) -> candle_core::Result<(T, Self)> {
        ASKED.set(true);
        let from = now()?;
        let made = f();
        Ok((made, Self { from, to: now()? }))
    }

    /// Where this span ends in the innermost pass; `None` for a pass whose order is unknown.
    pub(super) fn last(self) -> Option<Last> {
        PASSES.with_borrow(|passes| {
            let pass = passes.last().filter(|pass| !pass.made.is_empty())?;
            let place = pass.made.iter().rposition(|made| (self.from..self.to).contains(made)).unwrap_or(0);
            Some(Last { pass: pass.number, place })
        })
    }
}

impl Last {
    /// Whether the node `at`, which the innermost pass visits now, comes after this one.
    ///
    /// A pass that is over is behind; one around the innermost is within a node of its own, and stays there.
    pub(super) fn is_behind(self, at: TensorId) -> bool {
        PASSES.with_borrow(|passes| match passes.iter().position(|pass| pass.number == self.pass) {
            None => true,
            Some(i) if i + 1 < passes.len() => false,
            Some(i) => passes[i].places.get(&at).is_some_and(|&place| place > self.place),
        })
    }
}

/// Runs candle's backward pass of `loss`, whose order is known meanwhile.
pub(crate) fn pass<T>(loss: &Tensor, f: impl FnOnce() -> T) -> T {
    let nodes = if ASKED.get() { loss.sorted_nodes() } else { Vec::new() };
    let places = nodes.iter().enumerate().map(|(place, node)| (node.id(), place)).collect();
    let made = nodes.iter().map(|node| number(node.id())).collect();
    let pass = Pass { number: NEXT.replace(NEXT.get() + 1), places, made };
    struct Ended;
    impl Drop for Ended {
        fn drop(&mut self) {
            PASSES.with_borrow_mut(Vec::pop);
        }
    }
    PASSES.with_borrow_mut(|passes| passes.push(pass));
    let _ended = Ended;
    f()
}

/// Forgets passes that did not go through.
pub(super) fn forget() {
    PASSES.take();
}

/// The number of the next tensor, or of one that another thread makes meanwhile.
fn now() -> candle_core::Result<u64> {
    Ok(number(Tensor::new(0u8, &candle_core::Device::Cpu)?.id()))
}

/// candle numbers tensors in turn, and shows the number to hashers alone.
fn number(id: TensorId) -> u64 {
    struct Number(u64);
    impl Hasher for Number {
        fn write(&mut self, bytes: &[u8]) {
            self.0 = bytes.iter().fold(self.0, |number, &byte| number << 8 | u64::from(byte));
        }

        fn write_usize(&mut self, number: usize) {
            self.0 = number as u64;
        }

        fn finish(&self) -> u64 {
            self.0
        }
    }
    let mut hasher = Number(0);
    id.hash(&mut hasher);
    hasher.finish()
}
