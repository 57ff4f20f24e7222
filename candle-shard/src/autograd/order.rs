//! The progress of a backward pass: the order in which candle visits the nodes of a graph.
//!
//! A room above needs to know when a pass has *left a run*: when it has visited all nodes that were made while some
//! code ran. candle reports only visits of custom ops. These facts are enough:
//!
//! 1. candle numbers tensors by one counter of the process. So the nodes of a run have numbers in an interval, a
//!    [`NodeSpan`]. Other threads may take numbers of the interval too, but their nodes are not in this rank's graph.
//! 2. `Tensor::sorted_nodes` is the order in which `Tensor::backward` visits the nodes that need a gradient: each node
//!    comes before its inputs. It is known before the pass begins.
//! 3. So the last node of a span is the one with the highest place among the nodes whose numbers are in it. When the
//!    pass visits a node behind that place, no node of the run is left.
//!
//! The order is not that of the numbers: a run that takes tensors from several places can have nodes that candle visits
//! after nodes of the run before it. So it is not enough that the pass has reached the run before.
//!
//! A pass may run inside a node of another pass. The outer pass does not advance meanwhile, so it leaves no span.
use candle_core::{Tensor, TensorId};
use rustc_hash::FxHashMap;
use std::cell::{Cell, RefCell};
use std::hash::{Hash, Hasher};

thread_local! {
    /// The running backward passes of this thread, each inside a node of the previous one.
    static PASSES: RefCell<Vec<BackwardPass>> = const { RefCell::new(Vec::new()) };
    static NEXT: Cell<u64> = const { Cell::new(0) };
    /// Whether this thread has run units; only they need the order.
    static ASKED: Cell<bool> = const { Cell::new(false) };
}

/// A backward pass: the place of each node, and the number of the node at each place.
struct BackwardPass {
    number: u64,
    places: FxHashMap<TensorId, usize>,
    made: Vec<u64>,
}

/// The nodes that were created in an interval, by candle's numbers.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NodeSpan {
    from: u64,
    to: u64,
}

/// The last node of a span in a pass.
#[derive(Clone, Copy, Debug)]
pub(crate) struct LastNode {
    pass: u64,
    place: usize,
}

impl NodeSpan {
    /// Runs `f`; returns its result and the span of the nodes that it created.
    pub(crate) fn of<T>(f: impl FnOnce() -> T) -> candle_core::Result<(T, Self)> {
        let from = now()?;
        let made = f();
        Ok((made, Self { from, to: now()? }))
    }

    /// Returns the place where this span ends in the innermost pass.
    pub(crate) fn place(self) -> Option<usize> {
        self.last().map(|last| last.place)
    }

    /// Returns where this span ends in the innermost pass; `None` for a pass whose order is unknown.
    pub(crate) fn last(self) -> Option<LastNode> {
        PASSES.with_borrow(|passes| {
            let pass = passes.last().filter(|pass| !pass.made.is_empty())?;
            let place = pass.made.iter().rposition(|made| (self.from..self.to).contains(made)).unwrap_or(0);
            Some(LastNode { pass: pass.number, place })
        })
    }
}

impl LastNode {
    /// Returns whether the innermost pass, which is at the place `at`, has visited this node.
    ///
    /// A finished pass has; a pass around the innermost one has not moved past the node that it is in.
    pub(crate) fn is_before(self, at: Option<usize>) -> bool {
        PASSES.with_borrow(|passes| match passes.iter().position(|pass| pass.number == self.pass) {
            None => true,
            Some(i) if i + 1 < passes.len() => false,
            Some(_) => at.is_some_and(|place| place > self.place),
        })
    }
}

/// Records that this thread has run units: passes from now on know their order.
pub(crate) fn ask() {
    ASKED.set(true);
}

/// Returns the place of a node in the innermost pass.
pub(crate) fn place(node: TensorId) -> Option<usize> {
    PASSES.with_borrow(|passes| passes.last().and_then(|pass| pass.places.get(&node).copied()))
}

/// Runs candle's backward pass of `loss` with its order recorded.
pub(super) fn pass<T>(loss: &Tensor, f: impl FnOnce() -> T) -> T {
    let nodes = if ASKED.get() { loss.sorted_nodes() } else { Vec::new() };
    let places = nodes.iter().enumerate().map(|(place, node)| (node.id(), place)).collect();
    let made = nodes.iter().map(|node| number(node.id())).collect();
    let pass = BackwardPass { number: NEXT.replace(NEXT.get() + 1), places, made };
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

/// Clears the passes of a failed backward pass.
pub(super) fn forget() {
    PASSES.take();
}

/// Returns the number of the next tensor, or of one that another thread creates at the same time.
fn now() -> candle_core::Result<u64> {
    Ok(number(Tensor::new(0u8, &candle_core::Device::Cpu)?.id()))
}

/// candle numbers tensors in sequence, in the order of their creation, but exposes the number only to hashers.
pub(super) fn number(id: TensorId) -> u64 {
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
