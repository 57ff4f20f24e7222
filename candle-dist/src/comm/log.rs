//! Logs every call of a thread.
use super::event::Event;
use super::scope::{Collect, CommScope};
use std::fmt;

impl Collect for Vec<Event> {
    fn add(&mut self, event: &Event) {
        self.push(event.clone());
    }
}

/// A log of the communication of this thread while the log is alive.
///
/// Calls are recorded when they end, including failed ones. Logs nest: an outer log includes those of inner logs.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::{Op, ReduceOp, World, comm::Log};
///
/// let ops = World::threads(2).run(|ctx| -> candle_dist::Result<Vec<Op>> {
///     let x = Tensor::new(&[1f32, 2.0], &Device::Cpu)?;
///     let log = Log::start();
///     ctx.group().all_reduce(&x, ReduceOp::Sum)?;
///     ctx.group().barrier()?;
///     Ok(log.events().iter().map(|event| event.op).collect())
/// })?;
/// assert_eq!(ops[0], [Op::AllReduce, Op::Barrier]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[must_use = "a log ends when it is dropped"]
pub struct Log(CommScope<Vec<Event>>);

impl Log {
    /// Starts a log of this thread's communication.
    pub fn start() -> Self {
        Self(CommScope::open())
    }

    /// Runs `f` and returns the communication of this thread in it.
    pub fn of<R>(f: impl FnOnce() -> R) -> (R, Vec<Event>) {
        let log = Self::start();
        let result = f();
        (result, log.finish())
    }

    /// Returns the events so far, in the order in which they ended.
    pub fn events(&self) -> Vec<Event> {
        self.0.0.borrow().clone()
    }

    /// Ends the log and returns its events.
    pub fn finish(self) -> Vec<Event> {
        self.0.0.take()
    }
}

impl fmt::Debug for Log {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Log({} events)", self.0.0.borrow().len())
    }
}
