//! The engine that is always there: ranks are threads of one process.
//!
//! A collective is a *round* (`rendezvous.rs`): every rank offers its operands with its [`Call`], waits until all came,
//! checks that the calls agree, computes its own results straight from the peers' buffers, and leaves when all have
//! read. Nothing is copied that is not the result. Reductions run in rank order.
mod collective;
mod mailbox;
mod reduce;
mod regions;
mod rendezvous;
mod state;
mod wait;

pub(crate) use state::{End, RankGuard, WorldState};

use super::{Backend, Call, Results, Tensors, Unfinished};
use crate::{Error, GroupFailure, Result};
use candle_core::Tensor;
use collective::compute;
use parking_lot::Mutex;
use rendezvous::{GroupState, Round};
use state::On;
use std::sync::Arc;

/// One rank's handle on a group of threads.
pub(crate) struct LocalBackend {
    group: Arc<GroupState>,
    rank: usize,
    /// The number of rounds started.
    turn: Mutex<u64>,
}

impl std::fmt::Debug for LocalBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "LocalBackend(rank {} of {:?})", self.rank, self.group.ranks())
    }
}

impl LocalBackend {
    /// The handle of `rank` (in the group) on the group of all ranks of `world`.
    pub(crate) fn world(world: &Arc<WorldState>, rank: usize) -> Result<Self> {
        let ranks: Vec<usize> = (0..world.size()).collect();
        Ok(Self::join(world, rank, &ranks, rank))
    }

    fn join(world: &Arc<WorldState>, global_rank: usize, ranks: &[usize], rank: usize) -> Self {
        Self { group: GroupState::join(world, global_rank, ranks), rank, turn: Mutex::new(0) }
    }

    fn enter(&self, call: Call, tensors: Tensors) -> Result<Arc<Round>> {
        let mut turn = self.turn.lock();
        *turn += 1;
        self.group.start(self.rank, *turn, call, tensors)
    }
}

/// A round that this member has started and not finished.
struct Started {
    group: Arc<GroupState>,
    rank: usize,
    /// `None` once it is finished.
    round: Option<Arc<Round>>,
}

impl Unfinished for Started {
    fn is_ready(&self) -> Result<bool> {
        self.group.world().check()?;
        Ok(self.round.as_ref().is_none_or(|round| self.group.is_ready(&On::Entered(round.clone()))))
    }

    fn finish(mut self: Box<Self>) -> Result<Results> {
        let Some(round) = self.round.take() else { return Ok(Results::new()) };
        let result = self.group.finish(self.rank, &round, false, |call, all| compute(call, self.rank, all));
        if result.is_err() {
            self.round = Some(round); // to be left on drop
        }
        result
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(round) = self.round.take() {
            self.group.leave(self.rank, &round);
        }
    }
}

impl Backend for LocalBackend {
    fn name(&self) -> &'static str {
        "local"
    }

    fn rank(&self) -> usize {
        self.rank
    }

    fn ranks(&self) -> &[usize] {
        self.group.ranks()
    }

    fn run(&self, call: Call, tensors: Tensors) -> Result<Results> {
        let round = self.enter(call, tensors)?;
        self.group.finish(self.rank, &round, true, |call, all| compute(call, self.rank, all))
    }

    fn start(&self, call: Call, tensors: Tensors) -> Result<Box<dyn Unfinished>> {
        let round = Some(self.enter(call, tensors)?);
        Ok(Box::new(Started { group: self.group.clone(), rank: self.rank, round }))
    }

    fn send(&self, call: Call, tensor: Tensor) -> Result<()> {
        self.group.send(self.rank, call, tensor)
    }

    fn recv(&self, call: Call) -> Result<Tensor> {
        self.group.recv(self.rank, call)
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
        Ok(Arc::new(Self::join(self.group.world(), me, &ranks, rank)))
    }

    fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.group.world().failure()
    }
}
