//! Counting communication, scoped to a closure.
use crate::backend::{Call, Op, RAGGED};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

/// How often an op ran and how many bytes this rank put in.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Count {
    /// The number of calls.
    pub count: usize,
    /// The bytes of this rank's inputs, summed over the calls.
    pub bytes: usize,
}

/// The communication that one rank made, by kind.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommCounts(BTreeMap<Op, Count>);

impl CommCounts {
    /// The count of one kind.
    pub fn get(&self, op: Op) -> Count {
        self.0.get(&op).copied().unwrap_or_default()
    }

    /// The number of calls of all kinds.
    pub fn total(&self) -> usize {
        self.0.values().map(|c| c.count).sum()
    }

    /// The kinds that occurred with their counts, in a fixed order.
    pub fn iter(&self) -> impl Iterator<Item = (Op, Count)> + '_ {
        self.0.iter().map(|(&op, &count)| (op, count))
    }

    fn add(&mut self, op: Op, bytes: usize) {
        let entry = self.0.entry(op).or_default();
        entry.count += 1;
        entry.bytes += bytes;
    }
}

impl fmt::Display for CommCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() {
            return f.write_str("no communication");
        }
        for (i, (op, Count { count, bytes })) in self.iter().enumerate() {
            write!(f, "{}{count} {op} ({bytes} B)", if i > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

thread_local! {
    static OPEN: RefCell<Vec<CommCounts>> = const { RefCell::new(Vec::new()) };
}

/// Runs `f` and counts the communication that this thread makes in it, backward passes included.
///
/// Scopes nest; an inner scope's communication counts in the outer one too. Groups of one rank do not communicate.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::{Op, ReduceOp, World, comm};
///
/// let counts = World::local(2).run(|ctx| -> candle_dist::Result<_> {
///     let x = Tensor::zeros(8, candle_core::DType::F32, &Device::Cpu)?;
///     let (sum, counts) = comm::record(|| ctx.group().all_reduce(&x, ReduceOp::Sum));
///     sum.map(|_| counts)
/// })?;
/// assert_eq!(counts[0].get(Op::AllReduce).count, 1);
/// assert_eq!(counts[0].get(Op::AllReduce).bytes, 32);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn record<R>(f: impl FnOnce() -> R) -> (R, CommCounts) {
    /// Closes the scope also when `f` unwinds.
    struct Scope;
    impl Drop for Scope {
        fn drop(&mut self) {
            if std::thread::panicking() {
                OPEN.with_borrow_mut(Vec::pop);
            }
        }
    }
    OPEN.with_borrow_mut(|open| open.push(CommCounts::default()));
    let scope = Scope;
    let result = f();
    drop(scope);
    let counts = OPEN.with_borrow_mut(Vec::pop).unwrap_or_default();
    OPEN.with_borrow_mut(|open| {
        if let Some(outer) = open.last_mut() {
            for (op, c) in counts.iter() {
                let entry = outer.0.entry(op).or_default();
                entry.count += c.count;
                entry.bytes += c.bytes;
            }
        }
    });
    (result, counts)
}

/// Counts one call whose input on this rank has `elements` elements.
pub(crate) fn note(call: &Call, elements: usize) {
    debug_assert_ne!(elements, RAGGED);
    OPEN.with_borrow_mut(|open| {
        if let Some(counts) = open.last_mut() {
            counts.add(call.op, elements * call.dtype.map_or(0, |d| d.size_in_bytes()));
        }
    });
}
