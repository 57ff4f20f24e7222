//! A barrier that names who is missing.
use super::ProcessGroup;
use crate::backend::{Backend, Call, Dims, Op};
use crate::{Cause, Result};
use candle_core::{DType, Device, Tensor};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// What the ranks say to each other.
const HERE: u32 = 0;
const GO: u32 = 1;

/// How long the verdict of rank 0 may take to arrive.
const VERDICT: Duration = Duration::from_secs(5);

impl ProcessGroup {
    /// A [`barrier`](Self::barrier) that names every missing rank, for finding out who hangs.
    ///
    /// Rank 0 of the group (of the world, where ranks are processes) waits until all others have called, at most for
    /// `timeout`; the others wait as long for rank 0 to call. It takes two messages for each rank through rank 0, so it is
    /// no barrier for every step. The timeouts of the group and the world do not count here.
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
    /// [`Cause::Missing`] with the ranks of the world that did not call in time: the world stops, and all ranks get the same
    /// error. Also where the engine can neither do this nor probe for messages.
    #[track_caller]
    pub fn monitored_barrier(&self, timeout: Duration) -> Result<()> {
        let call = Call::new(Op::Barrier);
        if self.is_alone(&call)? {
            return Ok(());
        }
        self.engage(call, 0, |engine, call| self.monitor(engine, &call, timeout))
    }

    fn monitor(&self, engine: &dyn Backend, call: &Call, timeout: Duration) -> Result<()> {
        if let Some(own) = engine.monitored_barrier(call, timeout) {
            return own;
        }
        let (began, me) = (Instant::now(), self.rank());
        // Rank 0 has as much time from its own call on, and then says who is missing: that comes first.
        let patience = timeout.saturating_mul(2).saturating_add(VERDICT);
        let others = |peer: usize, tag| Call {
            op: Op::Recv,
            dtype: Some(DType::U8),
            shape: Dims::from_slice(&[1]),
            peer: Some(peer),
            tag,
            timeout: Some(patience),
            ..call.clone()
        };
        engine.probe(&others(usize::from(me == 0), HERE))?; // or an error, before anything is sent
        let pair = self.monitor_engine(engine)?;
        let token = Tensor::zeros(1, DType::U8, &Device::Cpu)?;
        let send = |to: usize, tag| pair.send(Call { op: Op::Send, ..others(to, tag) }, token.clone());
        let senders: Vec<usize> = if me == 0 { (1..self.size()).collect() } else { vec![0] };
        senders.iter().try_for_each(|&to| send(to, HERE))?;
        let mut missing = senders.clone();
        let mut pause = Duration::from_micros(20);
        loop {
            let mut left = Vec::new();
            for &from in &missing {
                match pair.probe(&others(from, HERE))? {
                    Some(_) => drop(pair.recv(others(from, HERE))?),
                    None => left.push(from),
                }
            }
            missing = left;
            if missing.is_empty() {
                break;
            }
            if began.elapsed() >= timeout {
                let ranks = missing.iter().map(|&member| self.ranks()[member]).collect();
                return Err(self.stop(Cause::Missing { ranks, after: timeout }));
            }
            std::thread::sleep(pause);
            pause = (pause * 2).min(Duration::from_millis(1));
        }
        match me {
            0 => senders.iter().try_for_each(|&to| send(to, GO)),
            // Rank 0 is there, and says who is not.
            _ => pair.recv(others(0, GO)).map(drop),
        }
    }

    /// A group of the same members, whose messages meet no others.
    fn monitor_engine(&self, engine: &dyn Backend) -> Result<Arc<dyn Backend>> {
        if let Some(made) = self.monitor.get() {
            return Ok(made.clone());
        }
        let members: Vec<usize> = (0..self.size()).collect();
        let made = engine.subgroup(&members)?;
        Ok(self.monitor.get_or_init(|| made).clone())
    }
}
