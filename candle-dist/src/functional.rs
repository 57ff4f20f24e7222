//! Communication that candle can differentiate: one op with a forward and a backward step, and the table of pairs.
//!
//! candle differentiates each rank's *local* program, so a collective needs the backward that makes local gradients
//! those of the global program. The pairs:
//!
//! | constructor | forward | backward | Megatron-LM |
//! |---|---|---|---|
//! | [`Exchange::all_reduce`] | all_reduce | identity | *g* |
//! | [`Exchange::to_varying`] | identity | all_reduce | *f* |
//! | [`Exchange::to_invariant`] | identity | the first rank keeps it, zeros elsewhere | |
//! | [`Exchange::all_gather`] | all_gather | reduce_scatter | *g-bar* backward of sequence parallel |
//! | [`Exchange::all_gather_invariant`] | all_gather | slice | |
//! | [`Exchange::slice`] | slice | all_gather | |
//! | [`Exchange::slice_varying`] | slice | zero-pad | |
//! | [`Exchange::zero_pad`] | zero-pad | slice | |
//! | [`Exchange::reduce_scatter`] | reduce_scatter | all_gather | *g-bar* |
//! | [`Exchange::all_to_all`] | all_to_all | all_to_all back | |
//! | [`Exchange::all_to_all_single`] | all_to_all_single | all_to_all_single back | |
//! | [`Exchange::recut`] | all_to_all_single of what changes hands | the same back | |
//! | [`Exchange::to_partial`] | the first rank keeps it, zeros elsewhere | identity | |
//! | [`Exchange::to_partial_varying`] | the first rank keeps it, zeros elsewhere | the same | |
//!
//! *Varying* and *invariant* are the two states of a replicated value: the gradient of a varying one is a partial sum
//! on each rank, that of an invariant one is replicated. Sources: Shoeybi et al. 2019 (arXiv:1909.08053), Korthikanti
//! et al. 2022 (arXiv:2205.05198), and JAX's `shard_map` for the two states.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use candle_dist::{World, functional::Exchange};
//!
//! let grads = World::local(2).run(|ctx| -> candle_dist::Result<Vec<f32>> {
//!     let w = Var::new(&[1f32], &Device::Cpu)?;
//!     let view = Exchange::to_varying().apply(&w, ctx.group())?;
//!     let loss = (view * (ctx.rank() + 1) as f64)?; // a different use on every rank
//!     Ok(loss.backward()?.get(&w).unwrap().to_vec1::<f32>()?)
//! })?;
//! assert_eq!(grads, [[3.0], [3.0]]);
//! # Ok::<(), candle_dist::WorldError>(())
//! ```
pub use crate::call::Cut;

use crate::backend::{Fresh, Ready};
use crate::call::{Call, Dims, Op, ReduceOp, total};
use crate::{Error, ProcessGroup, Result};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Shape, Tensor};
use smallvec::smallvec;
use std::panic::Location;

/// One movement of data within a group, without gradient.
#[derive(Debug, Clone, PartialEq)]
pub enum Step {
    /// The same data.
    Identity,
    /// The data on the first rank, zeros on the others.
    First,
    /// The reduction over the group.
    AllReduce(ReduceOp),
    /// All pieces joined along `dim`.
    AllGather(Cut),
    /// This rank's piece of `dim`.
    Slice(Cut),
    /// This rank's piece put at its place among zeros.
    ZeroPad(Cut),
    /// This rank's piece of the sum.
    ReduceScatter(Cut, ReduceOp),
    /// Pieces of the first cut sent, pieces of the second joined.
    AllToAll(Cut, Cut),
    /// Rows of dim 0 sent: from each rank, to each rank, so many.
    AllToAllSingle(Vec<Dims>),
    /// Pieces of the first cut to pieces of the second one of the same dim; only what changes hands is sent.
    Recut(Cut, Cut),
}

/// What a step made: fresh memory, or a view that needs none.
enum Made {
    Fresh(Fresh),
    View(Tensor),
}

impl Step {
    /// Takes the step for the code at `site`.
    fn run(&self, x: &Tensor, group: &ProcessGroup, site: &'static Location<'static>) -> Result<Made> {
        self.check(x, group)?;
        let joined =
            |call: Call, cut: &Cut| Call { dims: smallvec![cut.dim], sizes: smallvec![cut.sizes.clone()], ..call };
        let call = match self {
            Self::Identity => return Ok(Made::View(x.clone())),
            Self::First if group.rank() == 0 => return Ok(Made::View(x.clone())),
            // Not a product with zero, which would keep what is not finite.
            Self::First => return Ok(Made::View(x.zeros_like()?)),
            Self::Recut(from, to) => return recut(x, from, to, group, site).map(Made::View),
            Self::Slice(cut) => {
                let (start, len) = (cut.start(group.rank()), cut.sizes[group.rank()]);
                // candle panics on views without elements that begin behind their memory.
                let start = if len * x.elem_count() == 0 { 0 } else { start };
                return Ok(Made::View(x.narrow(cut.dim, start, len)?));
            }
            Self::ZeroPad(cut) => {
                let before = cut.start(group.rank());
                let after = cut.sizes.iter().sum::<usize>() - before - x.dim(cut.dim)?;
                return Ok(Made::View(x.pad_with_zeros(cut.dim, before, after)?));
            }
            Self::AllReduce(op) => Call { reduce: Some(*op), ..Call::on(Op::AllReduce, x, &[]) },
            Self::AllGather(cut) => joined(Call::on(Op::AllGather, x, &[cut.dim]), cut),
            Self::ReduceScatter(cut, op) => {
                joined(Call { reduce: Some(*op), ..Call::on(Op::ReduceScatter, x, &[]) }, cut)
            }
            Self::AllToAll(split, concat) => Call {
                dims: smallvec![split.dim, concat.dim],
                sizes: smallvec![split.sizes.clone(), concat.sizes.clone()],
                ..Call::on(Op::AllToAll, x, &[concat.dim])
            },
            Self::AllToAllSingle(counts) => ProcessGroup::routed(x, counts),
        };
        Ok(match group.exchange(Call { site, ..call }, x)? {
            Some(fresh) => Made::Fresh(fresh),
            None => Made::View(x.clone()),
        })
    }

    /// The shape that `rank` gets for its tensor of shape `mine`, which the step fits.
    fn result_shape(&self, mine: &[usize], rank: usize) -> Dims {
        let mut shape = Dims::from_slice(mine);
        match self {
            Self::Identity | Self::First | Self::AllReduce(_) => {}
            Self::AllGather(cut) | Self::ZeroPad(cut) => shape[cut.dim] = cut.sizes.iter().sum(),
            Self::Slice(cut) | Self::ReduceScatter(cut, _) => shape[cut.dim] = cut.sizes[rank],
            Self::AllToAll(split, concat) => {
                shape[split.dim] = split.sizes[rank];
                shape[concat.dim] = concat.sizes.iter().sum();
            }
            Self::AllToAllSingle(counts) => shape[0] = counts.iter().map(|counts| counts[rank]).sum(),
            Self::Recut(_, to) => shape[to.dim] = to.sizes[rank],
        }
        shape
    }

    /// Refuses pieces that do not fit the tensor or the group, before anything is sent.
    fn check(&self, x: &Tensor, group: &ProcessGroup) -> Result<()> {
        let whole = |cut: &Cut| x.dims().get(cut.dim).copied() == total(&cut.sizes);
        let piece = |cut: &Cut| x.dims().get(cut.dim).copied() == cut.sizes.get(group.rank()).copied();
        let count = |cut: &Cut| cut.sizes.len() == group.size();
        let fits = match self {
            Self::AllGather(cut) | Self::ZeroPad(cut) => count(cut) && piece(cut),
            Self::ReduceScatter(cut, _) | Self::Slice(cut) => count(cut) && whole(cut),
            Self::AllToAll(split, concat) => {
                count(split) && count(concat) && whole(split) && piece(concat) && split.dim != concat.dim
            }
            Self::AllToAllSingle(counts) => return group.check_routes(x, counts),
            Self::Recut(from, to) => {
                let total = |cut: &Cut| total(&cut.sizes);
                count(from) && count(to) && piece(from) && from.dim == to.dim && total(from) == total(to)
            }
            Self::Identity | Self::First | Self::AllReduce(_) => true,
        };
        if fits {
            return Ok(());
        }
        let reason = format!("{self:?} does not fit shape {:?} on {} ranks", x.dims(), group.size());
        Err(Error::InvalidArgument { rank: group.ranks()[group.rank()], op: "exchange", reason })
    }
}

/// This rank's piece by the cut `to`, of its piece by the cut `from` and what the others send of theirs.
///
/// Pieces follow each other in rank order, so what goes to lower ranks lies before what stays, and comes from them
/// before it.
fn recut(x: &Tensor, from: &Cut, to: &Cut, group: &ProcessGroup, site: &'static Location<'static>) -> Result<Tensor> {
    let (rank, size, dim) = (group.rank(), group.size(), from.dim);
    let range = |cut: &Cut, rank: usize| cut.start(rank)..cut.start(rank) + cut.sizes[rank];
    let common = |source: usize, target: usize| {
        let (a, b) = (range(from, source), range(to, target));
        a.start.max(b.start)..a.end.min(b.end).max(a.start.max(b.start))
    };
    let sent = |source: usize, target: usize| if source == target { 0 } else { common(source, target).len() };
    let counts: Vec<Dims> = (0..size).map(|source| (0..size).map(|target| sent(source, target)).collect()).collect();
    let (to_lower, stays): (usize, usize) = (counts[rank][..rank].iter().sum(), common(rank, rank).len());
    let from_lower: usize = counts[..rank].iter().map(|row| row[rank]).sum();
    let from_higher: usize = counts[rank + 1..].iter().map(|row| row[rank]).sum();
    let rows = x.transpose(0, dim)?.contiguous()?;
    // candle panics on views without elements that begin behind their memory.
    let part = |x: &Tensor, start: usize, len: usize| {
        let start = if len * x.elem_count() == 0 { 0 } else { start };
        x.narrow(0, start, len)
    };
    let (kept, after) = (part(&rows, to_lower, stays)?, rows.dim(0)? - to_lower - stays);
    let parts = [part(&rows, 0, to_lower)?, part(&rows, to_lower + stays, after)?];
    let outgoing = Tensor::cat(&parts, 0)?;
    let call = Call { site, ..ProcessGroup::routed(&outgoing, &counts) };
    let incoming = match group.exchange(call, &outgoing)? {
        Some(fresh) => fresh.into_tensor(),
        None => outgoing,
    };
    let parts = [part(&incoming, 0, from_lower)?, kept, part(&incoming, from_lower, from_higher)?];
    Ok(Tensor::cat(&parts, 0)?.transpose(0, dim)?.contiguous()?)
}

/// A forward step with the backward step that belongs to it.
#[derive(Debug, Clone, PartialEq)]
pub struct Exchange {
    name: &'static str,
    forward: Step,
    backward: Step,
}

impl Exchange {
    const fn pair(name: &'static str, forward: Step, backward: Step) -> Self {
        Self { name, forward, backward }
    }

    /// Partial sums to a replicated value; its gradient is replicated.
    pub const fn all_reduce() -> Self {
        Self::pair("all_reduce", Step::AllReduce(ReduceOp::Sum), Step::Identity)
    }

    /// A replicated value used differently by the ranks: its gradients are summed.
    pub const fn to_varying() -> Self {
        Self::pair("to_varying", Step::Identity, Step::AllReduce(ReduceOp::Sum))
    }

    /// A varying value taken as invariant: the first rank's share is all of the gradient.
    pub const fn to_invariant() -> Self {
        Self::pair("to_invariant", Step::Identity, Step::First)
    }

    /// Pieces to the whole, used differently by the ranks.
    pub fn all_gather(cut: Cut) -> Self {
        Self::pair("all_gather", Step::AllGather(cut.clone()), Step::ReduceScatter(cut, ReduceOp::Sum))
    }

    /// Pieces to the whole, used alike by the ranks.
    pub fn all_gather_invariant(cut: Cut) -> Self {
        Self::pair("all_gather", Step::AllGather(cut.clone()), Step::Slice(cut))
    }

    /// An invariant whole to pieces.
    pub fn slice(cut: Cut) -> Self {
        Self::pair("slice", Step::Slice(cut.clone()), Step::AllGather(cut))
    }

    /// A varying whole to pieces.
    pub fn slice_varying(cut: Cut) -> Self {
        Self::pair("slice", Step::Slice(cut.clone()), Step::ZeroPad(cut))
    }

    /// Pieces to partial sums of the whole.
    pub fn zero_pad(cut: Cut) -> Self {
        Self::pair("zero_pad", Step::ZeroPad(cut.clone()), Step::Slice(cut))
    }

    /// Partial sums to pieces of the sum.
    pub fn reduce_scatter(cut: Cut) -> Self {
        Self::pair("reduce_scatter", Step::ReduceScatter(cut.clone(), ReduceOp::Sum), Step::AllGather(cut))
    }

    /// Pieces of the dim `concat` to pieces of the dim `split`.
    pub fn all_to_all(split: Cut, concat: Cut) -> Self {
        let back = Step::AllToAll(concat.clone(), split.clone());
        Self::pair("all_to_all", Step::AllToAll(split, concat), back)
    }

    /// Rows of dim 0 to the ranks that need them: `counts[s][r]` go from rank `s` to rank `r`.
    pub fn all_to_all_single<C: AsRef<[usize]>>(counts: &[C]) -> Self {
        let there: Vec<Dims> = counts.iter().map(|row| Dims::from_slice(row.as_ref())).collect();
        let column = |r: usize| there.iter().map(|row| row.get(r).copied().unwrap_or(0)).collect();
        let back = (0..there.len()).map(column).collect();
        Self::pair("all_to_all_single", Step::AllToAllSingle(there), Step::AllToAllSingle(back))
    }

    /// Pieces to pieces of other sizes of the same dim; what stays on its rank is not sent.
    pub fn recut(from: Cut, to: Cut) -> Self {
        Self::pair("recut", Step::Recut(from.clone(), to.clone()), Step::Recut(to, from))
    }

    /// A replicated value to partial sums of it: the first rank holds the value, the others zeros.
    ///
    /// So the sum is the value in every dtype, where n shares of one n-th would be rounded; only `-0` becomes `0`.
    pub const fn to_partial() -> Self {
        Self::pair("to_partial", Step::First, Step::Identity)
    }

    /// A varying replicated value to partial sums of it: the first rank holds the value and takes all of its gradient.
    pub const fn to_partial_varying() -> Self {
        Self::pair("to_partial", Step::First, Step::First)
    }

    /// The forward result of a value that was communicated before, with this pair's backward.
    ///
    /// `result` must be what the forward step would give for `x`; nothing is sent.
    ///
    /// # Errors
    /// If the shape or the dtype is another.
    #[track_caller]
    pub fn with_known_result(self, x: &Tensor, result: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
        self.forward.check(x, group)?;
        let shape = self.forward.result_shape(x.dims(), group.rank());
        if result.dims() != &shape[..] || result.dtype() != x.dtype() {
            let (got, want, dtype) = (result.dims(), shape.as_slice(), x.dtype().as_str());
            let reason =
                format!("a result {} {got:?} where {want:?} {dtype} is known to come", result.dtype().as_str());
            let rank = group.ranks()[group.rank()];
            return Err(Error::InvalidArgument { rank, op: self.name, reason });
        }
        self.record(x, Made::View(result.detach()), group)
    }

    /// Runs the forward step on `x`; the result carries a gradient if `x` does.
    ///
    /// What the backward step communicates counts as made here, too.
    #[track_caller]
    pub fn apply(self, x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
        if group.size() == 1 {
            return Ok(x.clone());
        }
        let made = self.forward.run(&x.detach(), group, Location::caller())?;
        self.record(x, made, group)
    }

    /// Puts what the forward step made into the graph.
    ///
    /// The communication has happened before candle takes its read lock on `x`, so no rank ever waits for another
    /// with a lock held; and fresh memory becomes the result's storage without a copy.
    #[track_caller]
    fn record(self, x: &Tensor, made: Made, group: &ProcessGroup) -> Result<Tensor> {
        if !x.track_op() {
            return Ok(match made {
                Made::Fresh(fresh) => fresh.into_tensor(),
                Made::View(view) => view,
            });
        }
        let fresh = match made {
            Made::Fresh(fresh) => fresh,
            Made::View(view) => Fresh::copy_of(&view)?,
        };
        let op = Recorded { exchange: self, group: group.clone(), site: Location::caller(), made: Ready::new(fresh) };
        Ok(x.apply_op1(op)?)
    }
}

/// The graph node of an exchange whose forward step has run.
struct Recorded {
    exchange: Exchange,
    group: ProcessGroup,
    /// Where the forward step was taken: the backward has no place in the user's code.
    site: &'static Location<'static>,
    made: Ready,
}

impl CustomOp1 for Recorded {
    fn name(&self) -> &'static str {
        self.exchange.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.made.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.made.cuda()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let made = self.exchange.backward.run(grad, &self.group, self.site)?;
        Ok(Some(match made {
            Made::Fresh(fresh) => fresh.into_tensor(),
            Made::View(view) => view,
        }))
    }
}
