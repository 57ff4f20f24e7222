//! The engine that is always there: ranks are threads of one process.
//!
//! A collective is a *round* (`rendezvous.rs`): every rank offers its operands with its [`Call`], waits until all came,
//! checks that the calls agree, computes its own results straight from the peers' buffers, and leaves when all have
//! read. Nothing is copied that is not the result. Reductions run in rank order.
mod mailbox;
mod reduce;
mod regions;
mod rendezvous;
mod state;
mod sync;
mod wait;

pub(crate) use state::{End, RankGuard, WorldState};

use super::{Backend, Call, Fresh};
use crate::{Error, GroupFailure, Result};
use candle_core::{Shape, Tensor};
use parking_lot::Mutex;
use regions::Piece;
use rendezvous::{GroupState, Offered, Tensors};
use smallvec::smallvec;
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

    /// Makes one round with `tensors`; `read` sees those of all members.
    fn round<R>(&self, call: Call, tensors: Tensors, read: impl FnOnce(&Offered<'_>) -> Result<R>) -> Result<R> {
        let round = {
            let mut turn = self.turn.lock();
            *turn += 1;
            self.group.start(self.rank, *turn, call, tensors)?
        };
        self.group.finish(self.rank, &round, true, read)
    }

    /// The piece of dim `axis` of `call` that belongs to `rank`: its start and length.
    fn piece(call: &Call, axis: usize, rank: usize) -> Piece {
        let sizes = &call.sizes[axis];
        Piece { dim: call.dims[axis], start: sizes[..rank].iter().sum(), len: sizes[rank] }
    }
}

/// The shape of `tensor` with `len` in place of the size of `dim`.
fn resized(tensor: &Tensor, dim: usize, len: usize) -> Shape {
    let mut dims = tensor.dims().to_vec();
    dims[dim] = len;
    Shape::from(dims)
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

    fn all_reduce(&self, call: Call, tensor: &Tensor) -> Result<Fresh> {
        let op = reduction(&call, self.rank)?;
        self.round(call, smallvec![tensor.clone()], |all| {
            Ok(Fresh { storage: reduce::reduce(&all.nth(0), op, None)?, shape: tensor.shape().clone() })
        })
    }

    fn all_gather(&self, call: Call, tensor: &Tensor) -> Result<Fresh> {
        let dim = call.dims[0];
        let shape = resized(tensor, dim, call.sizes[0].iter().sum());
        self.round(call, smallvec![tensor.clone()], |all| {
            Ok(Fresh { storage: regions::concat(&all.nth(0), None, dim)?, shape })
        })
    }

    fn reduce_scatter(&self, call: Call, tensor: &Tensor) -> Result<Fresh> {
        let op = reduction(&call, self.rank)?;
        let piece = Self::piece(&call, 0, self.rank);
        let shape = resized(tensor, piece.dim, piece.len);
        self.round(call, smallvec![tensor.clone()], |all| {
            Ok(Fresh { storage: reduce::reduce(&all.nth(0), op, Some(piece))?, shape })
        })
    }

    fn all_to_all(&self, call: Call, tensor: &Tensor) -> Result<Fresh> {
        let piece = Self::piece(&call, 0, self.rank);
        let (dim, total) = (call.dims[1], call.sizes[1].iter().sum());
        let mut dims = tensor.dims().to_vec();
        dims[piece.dim] = piece.len;
        dims[dim] = total;
        self.round(call, smallvec![tensor.clone()], |all| {
            Ok(Fresh { storage: regions::concat(&all.nth(0), Some(piece), dim)?, shape: Shape::from(dims) })
        })
    }

    fn broadcast(&self, call: Call, tensor: &Tensor) -> Result<Fresh> {
        let root = call.peer.unwrap_or(0);
        self.round(call, smallvec![tensor.clone()], |all| {
            Ok(Fresh { storage: regions::concat(&all.nth(0)[root..=root], None, 0)?, shape: tensor.shape().clone() })
        })
    }

    fn reduce(&self, call: Call, tensor: &Tensor) -> Result<Option<Fresh>> {
        let op = reduction(&call, self.rank)?;
        let is_root = call.peer == Some(self.rank);
        self.round(call, smallvec![tensor.clone()], |all| {
            is_root
                .then(|| Ok(Fresh { storage: reduce::reduce(&all.nth(0), op, None)?, shape: tensor.shape().clone() }))
                .transpose()
        })
    }

    fn scatter(&self, call: Call, tensor: Option<&Tensor>) -> Result<Fresh> {
        let piece = Self::piece(&call, 0, self.rank);
        let mut dims = call.shape.to_vec();
        dims[piece.dim] = piece.len;
        // Only the root offers a tensor, so it is the only one in the list.
        self.round(call, tensor.cloned().into_iter().collect(), |offered| {
            Ok(Fresh { storage: regions::concat(&offered.nth(0), Some(piece), 0)?, shape: Shape::from(dims) })
        })
    }

    fn gather(&self, call: Call, tensor: &Tensor) -> Result<Option<Fresh>> {
        let dim = call.dims[0];
        let is_root = call.peer == Some(self.rank);
        let shape = resized(tensor, dim, call.sizes[0].iter().sum());
        self.round(call, smallvec![tensor.clone()], |all| {
            is_root.then(|| Ok(Fresh { storage: regions::concat(&all.nth(0), None, dim)?, shape })).transpose()
        })
    }

    fn send(&self, call: Call, tensor: Tensor) -> Result<()> {
        self.group.send(self.rank, call, tensor)
    }

    fn recv(&self, call: Call) -> Result<Tensor> {
        self.group.recv(self.rank, call)
    }

    fn barrier(&self, call: Call) -> Result<()> {
        self.round(call, Tensors::new(), |_| Ok(()))
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

fn reduction(call: &Call, rank: usize) -> Result<super::ReduceOp> {
    call.reduce.ok_or_else(|| Error::InvalidArgument {
        rank,
        op: call.op.name(),
        reason: "the call names no reduction".to_string(),
    })
}
