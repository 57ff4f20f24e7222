//! What each collective computes from the tensors that the members offered.
use super::reduce::reduce;
use super::regions::{Piece, concat};
use super::rendezvous::Offered;
use crate::backend::{Call, Fresh, Op, Results};
use crate::{Error, Result};
use candle_core::{Shape, Tensor};

/// The results of member `me` of the collective that `call` describes.
pub(super) fn compute(call: &Call, me: usize, offered: &Offered<'_>) -> Result<Results> {
    let for_me = match call.op {
        Op::Reduce | Op::Gather => call.peer == Some(me),
        Op::Barrier => false,
        _ => true,
    };
    let tensors = if for_me { 1 + call.rest.len() } else { 0 };
    (0..tensors).map(|i| compute_one(call, me, i, &offered.nth(i))).collect()
}

/// The result for the `i`-th tensors of the members that offered one.
fn compute_one(call: &Call, me: usize, i: usize, all: &[&Tensor]) -> Result<Fresh> {
    let reduction = || {
        let missing = || Error::Unsupported(format!("{} without a reduction", call.op));
        call.reduce.ok_or_else(missing)
    };
    let root = call.peer.unwrap_or(0);
    let (storage, dims) = match call.op {
        Op::AllReduce | Op::Reduce => (reduce(all, reduction()?, None)?, all[me].dims().to_vec()),
        Op::Broadcast => (concat(&all[root..=root], None, 0)?, all[root].dims().to_vec()),
        Op::AllGather | Op::Gather => {
            let (dim, sizes) = (call.dims[i], &call.sizes[i]);
            (concat(all, None, dim)?, resized(all[me], dim, sizes.iter().sum()))
        }
        Op::ReduceScatter => {
            let piece = piece(call, i, me);
            (reduce(all, reduction()?, Some(piece))?, resized(all[me], piece.dim, piece.len))
        }
        // Only the root offers something to scatter.
        Op::Scatter => {
            let piece = piece(call, i, me);
            (concat(all, Some(piece), 0)?, resized(all[0], piece.dim, piece.len))
        }
        Op::AllToAll => {
            let (piece, join) = (piece(call, 0, me), call.dims[1]);
            let mut dims = resized(all[me], piece.dim, piece.len);
            dims[join] = call.sizes[1].iter().sum();
            (concat(all, Some(piece), join)?, dims)
        }
        op @ (Op::Send | Op::Recv | Op::Barrier) => return Err(Error::Unsupported(format!("{op} as a collective"))),
    };
    Ok(Fresh { storage, shape: Shape::from(dims) })
}

/// The piece of the `i`-th cut of `call` that belongs to `rank`.
fn piece(call: &Call, i: usize, rank: usize) -> Piece {
    let sizes = &call.sizes[i];
    Piece { dim: call.dims[i], start: sizes[..rank].iter().sum(), len: sizes[rank] }
}

/// The shape of `tensor` with `len` in place of the size of `dim`.
fn resized(tensor: &Tensor, dim: usize, len: usize) -> Vec<usize> {
    let mut dims = tensor.dims().to_vec();
    dims[dim] = len;
    dims
}
