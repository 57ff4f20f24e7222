//! A barrier that names missing ranks.
use super::ProcessGroup;
use crate::Result;
use crate::backend::{Call, Op};
use std::time::Duration;

impl ProcessGroup {
    /// Runs a [`barrier`](Self::barrier) that names every missing rank, to find ranks that hang.
    ///
    /// Every rank waits for all others, at most for its `timeout`. The timeouts of the group and the world are ignored
    /// here. Between processes it takes messages of each rank through rank 0 of the world, so do not call it in every
    /// step.
    ///
    /// ```
    /// use candle_dist::World;
    /// use std::time::Duration;
    ///
    /// let outcome = World::local(4).run(|ctx| -> candle_dist::Result<()> {
    ///     if ctx.rank() % 2 == 1 {
    ///         std::thread::sleep(Duration::from_millis(300)); // too late
    ///     }
    ///     ctx.group().monitored_barrier(Duration::from_millis(50))
    /// });
    /// let text = outcome.unwrap_err().message;
    /// assert!(text.contains("ranks 1, 3 did not come to the barrier within 50ms"), "{text}");
    /// ```
    ///
    /// # Errors
    /// [`Cause::Missing`](crate::Cause::Missing) with the ranks of the world that did not call in time: the world
    /// stops, and all ranks get the same error. Also if the backend does not support it.
    #[track_caller]
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        // It does not meet a barrier without a monitor.
        let call = Call { note: Some("monitored".into()), ..Call::new(Op::Barrier) };
        if self.is_alone(&call)? {
            return Ok(());
        }
        self.engage(call, 0, |backend, call| backend.monitored_barrier(call, timeout))
    }
}
