//! A backend: collectives that consist of messages only.
//!
//! Each rank sends its tensors to every other member and computes its own results with [`compute`]. Messages, groups
//! and failures are those of another backend. That is simple, and slow for large worlds: n² messages per call.
use candle_core::{DType, Device, Tensor};
use candle_dist::backend::{
    Backend, Call, Envelope, Form, Results, StartedCall, Tensors, compute, fill, filled,
};
use candle_dist::{Cause, Collective, Error, GroupFailure, Result};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// The first tag of collectives; programs use smaller tags.
const FIRST_TAG: u32 = 1 << 31;

/// One rank of a group whose collectives are messages.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::{ReduceOp, Result, World};
/// use extension::backend::ByMessages;
/// use std::sync::Arc;
///
/// let world = World::threads(3).wrap_backend(|inner| Arc::new(ByMessages::new(inner)));
/// let sums = world.run(|ctx| -> Result<f32> {
///     let mine = Tensor::new(&[ctx.rank() as f32], &Device::Cpu)?;
///     Ok(ctx.group().all_reduce(&mine, ReduceOp::Sum)?.to_vec1()?[0])
/// })?;
/// assert_eq!(sums, [3.0; 3]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone)]
pub struct ByMessages {
    inner: Arc<dyn Backend>,
    /// The tag of the next collective: all members make the same collectives in the same order.
    next: Arc<AtomicU32>,
}

impl ByMessages {
    /// Creates a backend whose messages, groups and failures are those of `inner`.
    pub fn new(inner: Arc<dyn Backend>) -> Self {
        Self { inner, next: Arc::new(AtomicU32::new(0)) }
    }

    fn others(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.inner.ranks().len()).filter(|&member| member != self.inner.rank())
    }

    fn give(&self, tensor: Tensor, to: usize, tag: u32) -> Result<()> {
        let call = Call::on(Collective::Send { to, tag }, &tensor);
        // A collective never waits at its start, however much is unread. Messages in flight need no handle.
        self.inner.start(call, [tensor].into_iter().collect(), Tensors::new()).map(drop)
    }

    fn take(&self, call: &Call, (shape, dtype): (&[usize], DType), from: usize, tag: u32) -> Result<Tensor> {
        let receive = Call::of(Collective::Recv { from: Some(from), tag }, dtype, shape);
        Ok(self.inner.recv(Call { timeout: call.timeout, ..receive }, None)?.1)
    }

    /// Sends this rank's part of a collective to all others: the call, the shapes of the tensors, and the tensors.
    fn post(&self, call: &Call, tensors: &[Tensor]) -> Result<u32> {
        let tag = FIRST_TAG | self.next.fetch_add(1, Ordering::Relaxed);
        let shapes: Vec<i64> = tensors
            .iter()
            .flat_map(|x| [x.rank()].into_iter().chain(x.dims().to_vec()))
            .map(|n| n as i64)
            .collect();
        for to in self.others() {
            self.give(Tensor::new(&[digest(call), shapes.len() as i64], &Device::Cpu)?, to, tag)?;
            if !shapes.is_empty() {
                self.give(Tensor::new(&shapes[..], &Device::Cpu)?, to, tag)?;
            }
            for tensor in tensors {
                self.give(tensor.force_contiguous()?, to, tag)?; // this rank may write to its own tensor meanwhile
            }
        }
        Ok(tag)
    }

    /// Waits for the parts of all members, and computes this rank's results.
    fn collect(&self, call: &Call, mine: Tensors, tag: u32) -> Result<Results> {
        let me = self.inner.rank();
        let mut parts: Vec<Tensors> = vec![Tensors::new(); self.inner.ranks().len()];
        for from in self.others() {
            let head = self.take(call, (&[2], DType::I64), from, tag)?.to_vec1::<i64>()?;
            if head[0] != digest(call) {
                return Err(self.mismatch(from));
            }
            let shapes = if head[1] == 0 {
                Vec::new()
            } else {
                self.take(call, (&[head[1] as usize], DType::I64), from, tag)?.to_vec1::<i64>()?
            };
            let mut rest = &shapes[..];
            while let Some((&rank, dims)) = rest.split_first() {
                let (dims, after) = dims.split_at(rank as usize);
                let dims: Vec<usize> = dims.iter().map(|&n| n as usize).collect();
                let dtype = match parts[from].len() {
                    0 => call.dtype.unwrap_or(DType::F32),
                    nth => call.rest[nth - 1].0,
                };
                parts[from].push(self.take(call, (&dims, dtype), from, tag)?);
                rest = after;
            }
        }
        parts[me] = mine;
        compute(call, me, &parts)
    }

    /// Stops the world, because a member makes another call than this rank.
    fn mismatch(&self, other: usize) -> Error {
        let [first, last] =
            [self.inner.rank().min(other), self.inner.rank().max(other)].map(|at| self.inner.ranks()[at]);
        self.inner.stop(Cause::Mismatch { rank: last, reference: first, what: "call" });
        self.inner
            .failure()
            .map_or_else(|| Error::Unsupported("a world that does not stop".to_string()), Error::Group)
    }
}

/// Returns a number for the properties on which all members must agree.
fn digest(call: &Call) -> i64 {
    let Call { collective, dtype, shape, rest, form, note, .. } = call;
    let mut hasher = DefaultHasher::new();
    format!("{collective:?} {dtype:?} {shape:?} {rest:?} {form:?} {note:?}").hash(&mut hasher);
    hasher.finish() as i64
}

/// A started collective, whose messages are sent.
struct Started {
    group: ByMessages,
    call: Call,
    mine: Tensors,
    tag: u32,
}

impl StartedCall for Started {
    fn is_ready(&self) -> Result<bool> {
        let receive = |from| Call::new(Collective::Recv { from: Some(from), tag: self.tag });
        let here = |from| self.group.inner.probe(&receive(from));
        for from in self.group.others() {
            if here(from)?.is_none() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn finish(self: Box<Self>) -> Result<Results> {
        let Self { group, call, mine, tag } = *self;
        group.collect(&call, mine, tag)
    }

    fn set_timeout(&mut self, timeout: Duration) -> bool {
        self.call.timeout = Some(timeout);
        self.group.inner.has_call_timeouts()
    }
}

impl Backend for ByMessages {
    fn name(&self) -> &'static str {
        "by messages"
    }

    fn rank(&self) -> usize {
        self.inner.rank()
    }

    fn ranks(&self) -> &[usize] {
        self.inner.ranks()
    }

    fn device(&self) -> &Device {
        self.inner.device()
    }

    fn run(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Results> {
        if call.collective.is_message() || call.form == Form::Monitored {
            return self.inner.run(call, tensors, outputs);
        }
        let tag = self.post(&call, &tensors)?;
        fill(&outputs, self.collect(&call, tensors, tag)?)
    }

    fn start(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Box<dyn StartedCall>> {
        if call.collective.is_message() {
            return self.inner.start(call, tensors, outputs);
        }
        let tag = self.post(&call, &tensors)?;
        // A copy, because a program may write to the tensor before the call is finished.
        let mine = tensors.iter().map(Tensor::force_contiguous).collect::<candle_core::Result<_>>()?;
        Ok(filled(Box::new(Started { group: self.clone(), call, mine, tag }), outputs))
    }

    fn recv(&self, call: Call, output: Option<&Tensor>) -> Result<(usize, Tensor)> {
        self.inner.recv(call, output)
    }

    fn copies_sent(&self, bytes: usize) -> bool {
        self.inner.copies_sent(bytes)
    }

    fn probe(&self, call: &Call) -> Result<Option<Envelope>> {
        self.inner.probe(call)
    }

    fn has_returned(&self, peer: usize) -> bool {
        self.inner.has_returned(peer)
    }

    fn has_call_timeouts(&self) -> bool {
        self.inner.has_call_timeouts()
    }

    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(Self::new(self.inner.subgroup(members)?)))
    }

    fn stop(&self, cause: Cause) {
        self.inner.stop(cause);
    }

    fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.inner.failure()
    }
}

#[cfg(test)]
mod tests {
    use super::ByMessages;
    use candle_dist::World;
    use candle_dist::testing::GROUPS;
    use std::sync::Arc;

    #[test]
    fn the_cases_of_the_conformance_suite_hold() {
        for (group, cases) in &GROUPS {
            // The arithmetic of long tensors does not depend on the world here.
            let worlds: &[usize] = if *group == "reductions" { &[3] } else { &[1, 3] };
            for case in *cases {
                for &n in worlds.iter().filter(|&&n| n >= case.least) {
                    let world = World::threads(n).wrap_backend(|inner| Arc::new(ByMessages::new(inner)));
                    if let Err(error) = world.run(case.run) {
                        panic!("{} on {n}: {error}", case.name);
                    }
                }
            }
        }
    }
}
