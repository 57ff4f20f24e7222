//! Counts communication within a closure.
use super::event::Event;
use super::scope::{Collect, CommScope};
use crate::call::Op;
use std::collections::BTreeMap;
use std::fmt;

/// The number of calls of an op, and the bytes of this rank's inputs.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Count {
    /// The number of calls.
    pub count: usize,
    /// The bytes of this rank's inputs, summed over the calls.
    pub bytes: usize,
}

/// The communication of one rank, by op.
///
/// Prints as one line, and with `{:#}` as a table of ops, calls and bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct CommCounts(BTreeMap<Op, Count>);

impl CommCounts {
    /// Returns the count of one op.
    pub fn get(&self, op: Op) -> Count {
        self.0.get(&op).copied().unwrap_or_default()
    }

    /// Returns the number of calls of all ops.
    pub fn total(&self) -> usize {
        self.0.values().map(|c| c.count).sum()
    }

    /// Returns the bytes of all ops.
    pub fn total_bytes(&self) -> usize {
        self.0.values().map(|c| c.bytes).sum()
    }

    /// Returns the ops that occurred with their counts, in a fixed order.
    pub fn iter(&self) -> impl Iterator<Item = (Op, Count)> + '_ {
        self.0.iter().map(|(&op, &count)| (op, count))
    }

    fn write_table(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let total = Count { count: self.total(), bytes: self.total_bytes() };
        let width = total.bytes.to_string().len().max("bytes".len());
        write!(f, "{:<14} {:>7} {:>width$}", "op", "calls", "bytes")?;
        let rows = self.iter().map(|(op, count)| (op.name(), count));
        for (name, Count { count, bytes }) in rows.chain([("total", total)]) {
            write!(f, "\n{name:<14} {count:>7} {bytes:>width$}")?;
        }
        Ok(())
    }
}

impl fmt::Display for CommCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if f.alternate() {
            return self.write_table(f);
        }
        if self.0.is_empty() {
            return f.write_str("no communication");
        }
        for (i, (op, Count { count, bytes })) in self.iter().enumerate() {
            write!(f, "{}{count} {op} ({bytes} B)", if i > 0 { ", " } else { "" })?;
        }
        Ok(())
    }
}

impl Collect for CommCounts {
    fn add(&mut self, event: &Event) {
        if !event.is_counted() {
            return;
        }
        let entry = self.0.entry(event.op).or_default();
        entry.count += 1;
        entry.bytes += event.bytes;
    }
}

/// Runs `f` and counts the communication of this thread in it, including backward passes.
///
/// Scopes nest; the communication of an inner scope counts in the outer one too. Failed calls count.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::{Op, ReduceOp, World, comm};
///
/// let counts = World::threads(2).run(|ctx| -> candle_dist::Result<_> {
///     let x = Tensor::zeros(8, candle_core::DType::F32, &Device::Cpu)?;
///     let (sum, counts) = comm::record(|| ctx.group().all_reduce(&x, ReduceOp::Sum));
///     sum.map(|_| counts)
/// })?;
/// assert_eq!(counts[0].get(Op::AllReduce).count, 1);
/// assert_eq!(counts[0].get(Op::AllReduce).bytes, 32);
/// println!("{:#}", counts[0]); // a table
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn record<R>(f: impl FnOnce() -> R) -> (R, CommCounts) {
    let scope = CommScope::<CommCounts>::open();
    let result = f();
    let counts = scope.0.take();
    (result, counts)
}
