//! Computes the results of each collective from the tensors of all members.
use super::device::{concat_pieces, reduce};
use super::fresh::{Fresh, Results, Tensors};
use super::overwrite::overwrite;
use super::runs::DimPiece;
use super::storage::StorageOperand;
use super::{reduce as host, regions};
use crate::call::{Call, Collective, Cut, Dims, ReduceOp};
use crate::{Error, Result};
use candle_core::{Shape, Tensor};
use smallvec::SmallVec;

/// One tensor of each member that has one, in group order.
pub(super) type Operands<'a> = SmallVec<[StorageOperand<'a>; 8]>;

/// The tensors of all members.
pub(super) trait MemberTensors {
    /// Returns the `i`-th tensor of every member that has one.
    fn nth(&self, i: usize) -> Operands<'_>;
}

impl MemberTensors for [Tensors] {
    fn nth(&self, i: usize) -> Operands<'_> {
        self.iter().filter_map(|tensors| tensors.get(i)).map(StorageOperand::of).collect()
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
/// use candle_dist::Collective;
/// use candle_dist::backend::{Call, Tensors, compute};
///
/// let all = [1f32, 2.0, 4.0].map(|x| Tensor::new(&[x], &Device::Cpu));
/// let all: Vec<Tensors> = all.into_iter().map(|x| Ok([x?].into_iter().collect())).collect::<candle_core::Result<_>>()?;
/// let call = Call::on(Collective::AllReduce(ReduceOp::Sum), &all[0][0]);
/// let sum = compute(&call, 1, &all)?.remove(0).into_tensor();
/// assert_eq!(sum.to_vec1::<f32>()?, [7.0]);
/// # Ok::<(), candle_dist::Error>(())
/// ```
///
/// # Errors
/// If the call is not a collective, or a tensor is missing or not contiguous.
pub fn compute(call: &Call, me: usize, tensors: &[Tensors]) -> Result<Results> {
    if call.collective.is_message() {
        return Err(Error::Unsupported(format!("{} as a collective", call.op())));
    }
    let gives = |rank: usize| match call.collective {
        Collective::Broadcast { root } if root != rank => 0,
        _ if call.collective.has_input(rank) => call.count(),
        _ => 0,
    };
    let missing = (0..tensors.len()).find(|&rank| tensors[rank].len() < gives(rank));
    if let Some(rank) = missing.or_else(|| (me >= tensors.len()).then_some(me)) {
        return Err(Error::Unsupported(format!("{}: the tensors of rank {rank} are missing", call.op())));
    }
    if tensors.iter().flatten().any(|tensor| !tensor.is_contiguous()) {
        return Err(Error::Unsupported(format!("{} of tensors that are not contiguous", call.op())));
    }
    results(call, me, tensors, &[])
}

/// Returns the results of member `me` of the collective that `call` describes, or writes them to `outputs` if there are some.
pub(super) fn results(
    call: &Call,
    me: usize,
    given: &(impl MemberTensors + ?Sized),
    outputs: &[Tensor],
) -> Result<Results> {
    if !outputs.is_empty() {
        return write(call, me, given, outputs).map(|()| Results::new());
    }
    let tensors = if call.collective.has_result(me) { call.count() } else { 0 };
    let result = |i: usize| {
        let all = given.nth(i);
        MemberResult::new(call, me, i, &all)?.compute(&all)
    };
    (0..tensors).map(result).collect()
}

/// Writes the results of member `me` to `outputs`.
fn write(call: &Call, me: usize, given: &(impl MemberTensors + ?Sized), outputs: &[Tensor]) -> Result<()> {
    outputs.iter().enumerate().try_for_each(|(i, output)| {
        let all = given.nth(i);
        MemberResult::new(call, me, i, &all)?.write(&all, output)
    })
}

/// The result of a member for one tensor of a call: what it is computed from, and how.
struct MemberResult {
    combination: Combination,
    /// The members that the result is computed from, counted among those that have a tensor.
    from: std::ops::Range<usize>,
    /// The piece of each tensor; `None` means the whole tensor.
    pieces: SmallVec<[Option<DimPiece>; 8]>,
    shape: Dims,
}

/// How a result comes from the tensors of members.
enum Combination {
    Reduce(ReduceOp),
    /// Joined along this dim.
    Concat(usize),
}

impl MemberResult {
    /// Describes the result for the `i`-th tensors of the members that have one.
    fn new(call: &Call, me: usize, i: usize, all: &[StorageOperand<'_>]) -> Result<Self> {
        let collective = &call.collective;
        // Only the root of a scatter has a tensor. In a broadcast, others may have one too.
        let root = if all.len() == 1 { 0 } else { collective.peer().unwrap_or(0) };
        let (everyone, root) = (0..all.len(), root..root + 1);
        let (combination, from, piece) = match collective {
            Collective::AllReduce(op) | Collective::Reduce { op, .. } => {
                (Combination::Reduce(*op), everyone, None)
            }
            Collective::Broadcast { .. } => (Combination::Concat(0), root, None),
            Collective::AllGather(cuts) => (Combination::Concat(cuts[i].dim), everyone, None),
            Collective::Gather { cut, .. } => (Combination::Concat(cut.dim), everyone, None),
            Collective::ReduceScatter(cuts, op) => {
                (Combination::Reduce(*op), everyone, Some(piece_of(&cuts[i], me)))
            }
            Collective::Scatter { cut, .. } => (Combination::Concat(0), root, Some(piece_of(cut, me))),
            Collective::AllToAllSingle(_) => (Combination::Concat(0), everyone, None),
            Collective::AllToAll { split, concat } => {
                (Combination::Concat(concat.dim), everyone, Some(piece_of(split, me)))
            }
            Collective::Send { .. } | Collective::Recv { .. } | Collective::Barrier => {
                return Err(Error::Unsupported(format!("{} as a collective", call.op())));
            }
        };
        let rows = |row: &Dims| DimPiece { dim: 0, start: row[..me].iter().sum(), len: row[me] };
        let pieces = match collective.counts() {
            Some(counts) => counts.iter().map(|row| Some(rows(row))).collect(),
            None => SmallVec::from_elem(piece, from.len()),
        };
        let mine = match collective {
            Collective::Scatter { .. } | Collective::Broadcast { .. } => all.get(from.start),
            _ => all.get(me),
        };
        let missing = || Error::Unsupported(format!("{}: a tensor is missing", call.op()));
        let shape = collective.output(i, mine.ok_or_else(missing)?.dims(), me);
        Ok(Self { combination, from, pieces, shape })
    }

    /// Returns the result in new memory.
    fn compute(&self, all: &[StorageOperand<'_>]) -> Result<Fresh> {
        let all = &all[self.from.clone()];
        let storage = match self.combination {
            Combination::Reduce(op) => reduce(all, op, self.pieces[0])?,
            Combination::Concat(dim) => concat_pieces(all, &self.pieces, dim)?,
        };
        Ok(Fresh { storage, shape: Shape::from(self.shape.as_slice()) })
    }

    /// Writes the result to the memory of `output`, which must have the same number of elements.
    fn write(&self, all: &[StorageOperand<'_>], output: &Tensor) -> Result<()> {
        if output.dims() != self.shape.as_slice() || output.dtype() != all[0].dtype() {
            let (got, dtype, want) = (output.dims(), output.dtype(), &self.shape);
            return Err(Error::Unsupported(format!(
                "a result of {want:?} in an output of {got:?} {dtype:?}"
            )));
        }
        if !output.device().is_cpu() {
            return overwrite(output, &[&self.compute(all)?.into_tensor()]);
        }
        let all = &all[self.from.clone()];
        match self.combination {
            Combination::Reduce(op) => host::reduce_into(output, all, op, self.pieces[0]),
            Combination::Concat(dim) => regions::concat_into(output, all, &self.pieces, dim),
        }
    }
}

/// Returns the piece of a cut that belongs to `rank`.
fn piece_of(cut: &Cut, rank: usize) -> DimPiece {
    let piece = cut.piece(rank);
    DimPiece { dim: cut.dim, start: piece.start, len: piece.len() }
}
