//! What each collective computes from the tensors that the members offered.
use super::rendezvous::Offered;
use crate::backend::device::{concat, concat_pieces, reduce};
use crate::backend::regions::Piece;
use crate::backend::{Call, Dims, Fresh, Op, Results};
use crate::{Error, Result};
use candle_core::{Shape, Tensor};

/// The results of member `me` of the collective that `call` describes.
pub(super) fn compute(call: &Call, me: usize, offered: &Offered<'_>) -> Result<Results> {
    let tensors = if call.gives_nothing(me) { 0 } else { 1 + call.rest.len() };
    (0..tensors).map(|i| compute_one(call, me, i, &offered.nth(i))).collect()
}

/// The result for the `i`-th tensors of the members that offered one.
fn compute_one(call: &Call, me: usize, i: usize, all: &[&Tensor]) -> Result<Fresh> {
    let reduction = || {
        let missing = || Error::Unsupported(format!("{} without a reduction", call.op));
        call.reduce.ok_or_else(missing)
    };
    let root = call.peer.unwrap_or(0);
    let storage = match call.op {
        Op::AllReduce | Op::Reduce => reduce(all, reduction()?, None)?,
        Op::Broadcast => concat(&all[root..=root], None, 0)?,
        Op::AllGather | Op::Gather => concat(all, None, call.dims[i])?,
        Op::ReduceScatter => reduce(all, reduction()?, Some(piece(call, i, me)))?,
        Op::Scatter => concat(all, Some(piece(call, i, me)), 0)?,
        Op::AllToAll if call.is_routed() => {
            let rows = |counts: &Dims| Piece { dim: 0, start: counts[..me].iter().sum(), len: counts[me] };
            concat_pieces(all, &call.sizes.iter().map(|counts| Some(rows(counts))).collect::<Vec<_>>(), 0)?
        }
        Op::AllToAll => concat(all, Some(piece(call, 0, me)), call.dims[1])?,
        op @ (Op::Send | Op::Recv | Op::Barrier) => return Err(Error::Unsupported(format!("{op} as a collective"))),
    };
    // Only the root offers something to scatter; otherwise everybody does.
    let mine = if call.op == Op::Scatter { all[0] } else { all[me] };
    Ok(Fresh { storage, shape: Shape::from(call.result_shape(me, i, mine.dims()).as_slice()) })
}

/// The piece of the `i`-th cut of `call` that belongs to `rank`.
fn piece(call: &Call, i: usize, rank: usize) -> Piece {
    let sizes = &call.sizes[i];
    Piece { dim: call.dims[i], start: sizes[..rank].iter().sum(), len: sizes[rank] }
}
