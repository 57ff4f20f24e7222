//! The backend for ranks that are threads of one process. It is always available.
//!
//! A collective is a *round* (`rendezvous.rs`). Every rank offers its operands with its [`Call`], waits until all ranks
//! have arrived, checks that the calls agree, computes its own results directly from the peers' buffers, and leaves
//! when all have read. Only results are copied. Reductions run in rank order.
//!
#![doc = include_str!("README.md")]

mod loan;
mod mailbox;
mod members;
mod rendezvous;
mod rounds;
mod sync;
mod wait;

pub(crate) use members::{RankGuard, WorldState};

use super::collective::{self, MemberTensors};
use super::outputs::{deliver, fill};
use super::recent::Recent;
use super::runs::DimPiece;
use super::storage::{StorageOperand, share_memory};
use super::{
    Backend, Call, Collective, Envelope, Form, Fresh, Results, StartedCall, Tensors, bytes, device, overwrite,
};
use crate::{Cause, Error, GroupFailure, Result};
use candle_core::{Device, Tensor};
use members::WaitCondition;
use parking_lot::Mutex;
use rendezvous::GroupState;
use rounds::{Round, RoundCursor};
use smallvec::{SmallVec, smallvec};
use std::sync::Arc;
use std::time::Duration;

/// One rank's handle on a group of threads.
pub(crate) struct ThreadBackend {
    group: Arc<GroupState>,
    rank: usize,
    device: Device,
    turn: Mutex<MemberProgress>,
}

/// The progress of a group's member.
struct MemberProgress {
    walk: RoundCursor,
    calls: Recent<Call>,
}

impl std::fmt::Debug for ThreadBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "ThreadBackend(rank {} of {:?})", self.rank, self.group.ranks())
    }
}

impl MemberProgress {
    /// Returns the call, in the memory of an equal one that came before: peers have that in their caches.
    fn shared(&mut self, call: Call) -> Arc<Call> {
        if call.collective.counts().is_some() {
            return Arc::new(call); // its sizes depend on data
        }
        let known = self.calls.find(|known| known.difference(&call).is_none() && known.prints_as(&call));
        known.unwrap_or_else(|| self.calls.keep(Arc::new(call)))
    }
}

impl ThreadBackend {
    /// Creates the handle of `rank` (in the group), which computes on `device`, on the group of all ranks of `world`.
    pub(crate) fn world(world: &Arc<WorldState>, rank: usize, device: Device) -> Self {
        let ranks: Vec<usize> = (0..world.size()).collect();
        Self::join(world, rank, &ranks, rank, device)
    }

    fn join(
        world: &Arc<WorldState>,
        global_rank: usize,
        ranks: &[usize],
        rank: usize,
        device: Device,
    ) -> Self {
        let (group, walk) = GroupState::join(world, global_rank, ranks);
        Self { group, rank, device, turn: Mutex::new(MemberProgress { walk, calls: Recent::default() }) }
    }

    fn enter(&self, call: Call, tensors: Tensors) -> Result<Round> {
        self.enter_into(call, tensors, &[], true)
    }

    fn enter_into(&self, call: Call, tensors: Tensors, outputs: &[Tensor], lingers: bool) -> Result<Round> {
        let mut turn = self.turn.lock();
        let call = turn.shared(call);
        let round = turn.walk.next();
        self.group.start(self.rank, &round, call, tensors, outputs, lingers)?;
        Ok(round)
    }

    /// Runs a call whose result overwrites its input.
    fn run_in_place(&self, call: Call, tensor: &Tensor) -> Result<Results> {
        match call.collective {
            // Tile by tile: data that one round reads is still in a cache when the next one writes.
            Collective::AllReduce(_) if bytes(tensor) >= PIECEWISE => {
                let (flat, tile) = (tensor.flatten_all()?, TILE / tensor.dtype().size_in_bytes());
                for start in (0..flat.elem_count()).step_by(tile) {
                    let tile = flat.narrow(0, start, tile.min(flat.elem_count() - start))?;
                    self.reduce_piecewise(call.clone(), (&tile, &[]), |pieces| write_parts(&tile, pieces))?;
                }
            }
            Collective::Broadcast { root } if root == self.rank => {
                let round = self.enter(call, smallvec![tensor.clone()])?;
                self.group.finish(self.rank, &round, None, |_, _| Ok(()))?;
            }
            // Only the root's tensor is read, so the others' may be written at the same time.
            Collective::Broadcast { .. } => {
                let round = self.enter(call, Tensors::new())?;
                self.group.finish(self.rank, &round, None, |_, all| match &all.nth(0)[..] {
                    // Ranks that are threads may share a variable.
                    [root] if share_memory(root, tensor) => Ok(()),
                    parts => write_parts(tensor, parts),
                })?;
            }
            _ => {
                let round = self.enter(call, smallvec![tensor.clone()])?;
                let made = self.group.finish(self.rank, &round, None, |call, all| {
                    collective::results(call, self.rank, all, &[])
                })?;
                fill(std::slice::from_ref(tensor), made)?;
            }
        }
        Ok(Results::new())
    }
}

/// A round that this member has started and not finished.
struct RoundCall {
    group: Arc<GroupState>,
    rank: usize,
    /// `None` when it is finished.
    round: Option<Round>,
    /// The memory for the results; empty for new memory.
    outputs: Tensors,
    timeout: Option<Duration>,
}

impl StartedCall for RoundCall {
    fn is_ready(&self) -> Result<bool> {
        self.group.world().check()?;
        let Some(round) = &self.round else { return Ok(true) };
        // A wait for a rank that has returned fails at once.
        Ok(round.is_complete() || self.group.is_deserted(&WaitCondition::Entered(round.clone())))
    }

    fn finish(mut self: Box<Self>) -> Result<Results> {
        let Some(round) = self.round.take() else { return Ok(Results::new()) };
        self.group.resume(self.rank, &round);
        let result = self.group.finish(self.rank, &round, self.timeout, |call, all| {
            collective::results(call, self.rank, all, &self.outputs)
        });
        if result.is_err() {
            self.round = Some(round); // to be left on drop
        }
        result
    }

    fn set_timeout(&mut self, timeout: Duration) -> bool {
        self.timeout = Some(timeout);
        true
    }
}

impl Drop for RoundCall {
    fn drop(&mut self) {
        if let Some(round) = self.round.take() {
            self.group.leave(self.rank, &round);
        }
    }
}

/// From this many bytes on, each rank reduces one piece and ranks share the pieces, instead of each reducing the whole.
const PIECEWISE: usize = 256 << 10;

/// The bytes per tile of an all_reduce in place.
const TILE: usize = 2 << 20;

impl ThreadBackend {
    /// Runs an all_reduce in two rounds: every rank reduces one piece, then `read` gets the pieces of all.
    ///
    /// All ranks together read each input once. In one round, every rank would read all of it.
    fn reduce_piecewise<R>(
        &self,
        call: Call,
        (tensor, outputs): (&Tensor, &[Tensor]),
        read: impl FnOnce(&[StorageOperand<'_>]) -> Result<R>,
    ) -> Result<R> {
        let (flat, n) = (tensor.flatten_all()?, self.group.ranks().len());
        let chunk = flat.elem_count().div_ceil(n);
        let start = (chunk * self.rank).min(flat.elem_count());
        let piece = DimPiece { dim: 0, start, len: chunk.min(flat.elem_count() - start) };
        let none = || Error::Unsupported(format!("{} without a reduction", call.op()));
        let op = call.collective.reduction().ok_or_else(none)?;
        let round = self.enter_into(call.clone(), smallvec![flat], outputs, true)?;
        let mine = self
            .group
            .finish(self.rank, &round, None, |_, all| device::reduce(&all.nth(0), op, Some(piece)))?;
        let mine = Fresh { storage: mine, shape: piece.len.into() }.into_tensor();
        let round = self.enter(call, smallvec![mine])?;
        self.group.finish(self.rank, &round, None, |_, all| read(&all.nth(0)))
    }
}

/// Fills `tensor` with the elements of `parts`, one after the other.
fn write_parts(tensor: &Tensor, parts: &[StorageOperand<'_>]) -> Result<()> {
    overwrite::overwrite(tensor, &parts.iter().map(|part| part.tensor).collect::<SmallVec<[&Tensor; 8]>>())
}

impl Backend for ThreadBackend {
    fn name(&self) -> &'static str {
        "threads"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> &[usize] {
        self.group.ranks()
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn run(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Results> {
        match (&call.collective, &tensors[..], &outputs[..]) {
            (Collective::Send { .. }, [tensor], _) => {
                self.group.send(self.rank, call, tensor.clone()).map(|()| Results::new())
            }
            (Collective::Barrier, ..) if call.form == Form::Monitored => {
                let timeout = call.timeout;
                let round = self.enter(call, tensors)?;
                self.group.monitor(self.rank, &round, timeout).map(|()| Results::new())
            }
            (_, [tensor], _) if call.form == Form::InPlace => self.run_in_place(call, tensor),
            // Two ranks read the same amount in one round as in two.
            (Collective::AllReduce(_), [tensor], _)
                if self.ranks().len() > 2 && bytes(tensor) >= PIECEWISE =>
            {
                let shape = tensor.shape().clone();
                self.reduce_piecewise(call, (tensor, &outputs), |pieces| match &outputs[..] {
                    [output] => write_parts(output, pieces).map(|()| Results::new()),
                    _ => Ok(smallvec![Fresh { storage: device::concat(pieces, None, 0)?, shape }]),
                })
            }
            _ => {
                let round = self.enter_into(call, tensors, &outputs, true)?;
                self.group.finish(self.rank, &round, None, |call, all| {
                    collective::results(call, self.rank, all, &outputs)
                })
            }
        }
    }

    fn start(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Box<dyn StartedCall>> {
        if let (Collective::Send { .. }, [tensor]) = (&call.collective, &tensors[..]) {
            return self.group.start_send(self.rank, call, tensor.clone());
        }
        let round = Some(self.enter_into(call, tensors, &outputs, false)?);
        self.group.pause(self.rank);
        Ok(Box::new(RoundCall { group: self.group.clone(), rank: self.rank, round, outputs, timeout: None }))
    }

    fn recv(&self, call: Call, output: Option<&Tensor>) -> Result<(usize, Tensor)> {
        let (from, message) = self.group.recv(self.rank, call)?;
        deliver(from, message, output)
    }

    fn probe(&self, call: &Call) -> Result<Option<Envelope>> {
        self.group.probe(self.rank, call)
    }

    fn has_returned(&self, peer: usize) -> bool {
        self.group.world().has_returned(self.group.ranks()[peer])
    }

    fn has_call_timeouts(&self) -> bool {
        true
    }

    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Backend>> {
        let ranks: Vec<usize> = members.iter().map(|&m| self.group.ranks()[m]).collect();
        let me = self.group.ranks()[self.rank];
        let rank = ranks.iter().position(|&r| r == me).ok_or_else(|| Error::InvalidArgument {
            rank: me,
            op: "subgroup",
            reason: format!("only members create a group, and this rank is not in {ranks:?}"),
        })?;
        self.group.world().check()?;
        Ok(Arc::new(Self::join(self.group.world(), me, &ranks, rank, self.device.clone())))
    }

    fn stop(&self, cause: Cause) {
        self.group.world().fail(cause);
    }

    fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.group.world().failure()
    }
}
