//! Computes the results of each collective from the tensors of all members.
use super::device::{concat_pieces, reduce};
use super::fresh::{Fresh, Results, Tensors};
use super::overwrite::overwrite;
use super::runs::Piece;
use super::storage::Operand;
use super::{reduce as host, regions};
use crate::call::{Call, Dims, Op, ReduceOp};
use crate::{Error, Result};
use candle_core::{Shape, Tensor};
use smallvec::SmallVec;

/// One tensor of each member that has one, in group order.
pub(super) type Operands<'a> = SmallVec<[Operand<'a>; 8]>;

/// The tensors of all members.
pub(super) trait Gives {
    /// Returns the `i`-th tensor of every member that has one.
    fn nth(&self, i: usize) -> Operands<'_>;
}

impl Gives for [Tensors] {
    fn nth(&self, i: usize) -> Operands<'_> {
        self.iter().filter_map(|tensors| tensors.get(i)).map(Operand::of).collect()
    }
}

/// Returns the results of member `me` of a collective, computed from the tensors of all members.
///
/// `tensors[r]` are the tensors of member `r`: as many as the call has, or none for members without input. This is for
/// backends that move whole tensors and leave the computation to this crate. Sums are the same as in every backend on
/// the CPU: in rank order, with 16-bit floats in f32.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::ReduceOp;
/// use candle_dist::backend::{Call, Op, Tensors, compute};
///
/// let all = [1f32, 2.0, 4.0].map(|x| Tensor::new(&[x], &Device::Cpu));
/// let all: Vec<Tensors> = all.into_iter().map(|x| Ok([x?].into_iter().collect())).collect::<candle_core::Result<_>>()?;
/// let call = Call { reduce: Some(ReduceOp::Sum), ..Call::on(Op::AllReduce, &all[0][0], &[]) };
/// let sum = compute(&call, 1, &all)?.remove(0).into_tensor();
/// assert_eq!(sum.to_vec1::<f32>()?, [7.0]);
/// # Ok::<(), candle_dist::Error>(())
/// ```
///
/// # Errors
/// If the call is not a collective, or a tensor is missing or not contiguous.
pub fn compute(call: &Call, me: usize, tensors: &[Tensors]) -> Result<Results> {
    let gives = |rank: usize| match call.op {
        Op::Scatter | Op::Broadcast if call.peer != Some(rank) => 0,
        Op::Barrier => 0,
        _ => 1 + call.rest.len(),
    };
    let missing = (0..tensors.len()).find(|&rank| tensors[rank].len() < gives(rank));
    if let Some(rank) = missing.or_else(|| (me >= tensors.len()).then_some(me)) {
        return Err(Error::Unsupported(format!("{}: the tensors of rank {rank} are missing", call.op)));
    }
    if tensors.iter().flatten().any(|tensor| !tensor.is_contiguous()) {
        return Err(Error::Unsupported(format!("{} of tensors that are not contiguous", call.op)));
    }
    results(call, me, tensors)
}

/// Returns the results of member `me` of the collective that `call` describes.
pub(super) fn results(call: &Call, me: usize, given: &(impl Gives + ?Sized)) -> Result<Results> {
    let tensors = if call.gives_nothing(me) { 0 } else { 1 + call.rest.len() };
    let result = |i: usize| {
        let all = given.nth(i);
        Task::new(call, me, i, &all)?.make(&all)
    };
    (0..tensors).map(result).collect()
}

/// Writes the results of member `me` to `outputs`.
pub(super) fn write(call: &Call, me: usize, given: &(impl Gives + ?Sized), outputs: &[Tensor]) -> Result<()> {
    outputs.iter().enumerate().try_for_each(|(i, output)| {
        let all = given.nth(i);
        Task::new(call, me, i, &all)?.write(&all, output)
    })
}

/// The computation of a member's result for one tensor of a call.
struct Task {
    what: What,
    /// The members that the result is computed from, counted among those that have a tensor.
    from: std::ops::Range<usize>,
    /// The piece of each tensor; `None` means the whole tensor.
    pieces: SmallVec<[Option<Piece>; 8]>,
    shape: Dims,
}

enum What {
    Reduce(ReduceOp),
    /// Joined along this dim.
    Join(usize),
}

impl Task {
    /// Creates the task for the `i`-th tensors of the members that have one.
    fn new(call: &Call, me: usize, i: usize, all: &[Operand<'_>]) -> Result<Self> {
        let reduction = || {
            let missing = || Error::Unsupported(format!("{} without a reduction", call.op));
            call.reduce.map(What::Reduce).ok_or_else(missing)
        };
        // Only the root of a scatter has a tensor. In a broadcast, others may have one too.
        let only_one = all.len() == 1;
        let root = if only_one { 0 } else { call.peer.unwrap_or(0) };
        let everyone = 0..all.len();
        let (what, from, piece) = match call.op {
            Op::AllReduce | Op::Reduce => (reduction()?, everyone, None),
            Op::Broadcast => (What::Join(0), root..root + 1, None),
            Op::AllGather | Op::Gather => (What::Join(call.dims[i]), everyone, None),
            Op::ReduceScatter => (reduction()?, everyone, Some(piece(call, i, me))),
            Op::Scatter => (What::Join(0), root..root + 1, Some(piece(call, i, me))),
            Op::AllToAll if call.is_routed() => (What::Join(0), everyone, None),
            Op::AllToAll => (What::Join(call.dims[1]), everyone, Some(piece(call, 0, me))),
            op @ (Op::Send | Op::Recv | Op::Barrier) => {
                return Err(Error::Unsupported(format!("{op} as a collective")));
            }
        };
        let pieces = match call.is_routed() {
            true => {
                let rows = |counts: &Dims| Piece { dim: 0, start: counts[..me].iter().sum(), len: counts[me] };
                call.sizes.iter().map(|counts| Some(rows(counts))).collect()
            }
            false => SmallVec::from_elem(piece, from.len()),
        };
        let mine = match call.op {
            Op::Scatter | Op::Broadcast => all.get(root),
            _ => all.get(me),
        };
        let missing = || Error::Unsupported(format!("{}: a tensor is missing", call.op));
        let shape = call.result_shape(me, i, mine.ok_or_else(missing)?.dims());
        Ok(Self { what, from, pieces, shape })
    }

    /// Returns the result in new memory.
    fn make(&self, all: &[Operand<'_>]) -> Result<Fresh> {
        let all = &all[self.from.clone()];
        let storage = match self.what {
            What::Reduce(op) => reduce(all, op, self.pieces[0])?,
            What::Join(dim) => concat_pieces(all, &self.pieces, dim)?,
        };
        Ok(Fresh { storage, shape: Shape::from(self.shape.as_slice()) })
    }

    /// Writes the result to the memory of `output`, which must have the same number of elements.
    fn write(&self, all: &[Operand<'_>], output: &Tensor) -> Result<()> {
        if output.dims() != self.shape.as_slice() || output.dtype() != all[0].dtype() {
            let (got, dtype, want) = (output.dims(), output.dtype(), &self.shape);
            return Err(Error::Unsupported(format!("a result of {want:?} in an output of {got:?} {dtype:?}")));
        }
        let all = &all[self.from.clone()];
        if !output.device().is_cpu() {
            return overwrite(output, &[&self.make(all)?.into_tensor()]);
        }
        match self.what {
            What::Reduce(op) => host::reduce_into(output, all, op, self.pieces[0]),
            What::Join(dim) => regions::concat_into(output, all, &self.pieces, dim),
        }
    }
}

/// Returns the piece of the `i`-th cut of `call` that belongs to `rank`.
fn piece(call: &Call, i: usize, rank: usize) -> Piece {
    let sizes = &call.sizes[i];
    Piece { dim: call.dims[i], start: sizes[..rank].iter().sum(), len: sizes[rank] }
}
