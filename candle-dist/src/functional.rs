//! Differentiable communication: an op with a forward and a backward step, and a table of such pairs.
//!
//! candle differentiates each rank's *local* program. A collective therefore needs a backward step that turns local
//! gradients into those of the global program. The pairs:
//!
//! | constructor | forward | backward | Megatron-LM |
//! |---|---|---|---|
//! | [`Exchange::all_reduce`] | all_reduce | identity | *g* |
//! | [`Exchange::to_varying`] | identity | all_reduce | *f* |
//! | [`Exchange::to_invariant`] | identity | rank 0 keeps it, zeros elsewhere | |
//! | [`Exchange::all_gather`] | all_gather | reduce_scatter | *g-bar* backward of sequence parallel |
//! | [`Exchange::all_gather_invariant`] | all_gather | slice | |
//! | [`Exchange::slice`] | slice | all_gather | |
//! | [`Exchange::slice_varying`] | slice | zero-pad | |
//! | [`Exchange::zero_pad`] | zero-pad | slice | |
//! | [`Exchange::reduce_scatter`] | reduce_scatter | all_gather | *g-bar* |
//! | [`Exchange::all_to_all`] | all_to_all | all_to_all back | |
//! | [`Exchange::all_to_all_single`] | all_to_all_single | all_to_all_single back | |
//! | [`Exchange::recut`] | all_to_all_single of the rows that move | the same back | |
//! | [`Exchange::windows`] | all_to_all_single of the rows that move | the same back, summed | |
//! | [`Exchange::to_partial`] | rank 0 keeps it, zeros elsewhere | identity | |
//! | [`Exchange::to_partial_varying`] | rank 0 keeps it, zeros elsewhere | the same | |
//!
//! *Varying* and *invariant* are the two states of a replicated value. The gradient of a varying value is a partial sum
//! on each rank; the gradient of an invariant value is replicated. Sources: Shoeybi et al. 2019 (arXiv:1909.08053),
//! Korthikanti et al. 2022 (arXiv:2205.05198), and JAX's `shard_map` for the two states.
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
mod rows;

pub use crate::call::Cut;

use crate::backend::{Fresh, Ready};
use crate::call::{Call, Dims, Op, ReduceOp, line_of, total};
use crate::{Error, ProcessGroup, Result, edges};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Shape, Tensor};
use rows::Window;
use smallvec::smallvec;
use std::ops::Range;
use std::panic::Location;

/// One data movement within a group, without gradient.
#[derive(Debug, Clone, PartialEq)]
enum Movement {
    /// Returns the data unchanged.
    Identity,
    /// Returns the data on rank 0 of the group, and zeros on the others.
    First,
    /// Returns the reduction over the group.
    AllReduce(ReduceOp),
    /// Returns all pieces joined along `dim`.
    AllGather(Cut),
    /// Returns this rank's piece of `dim`.
    Slice(Cut),
    /// Returns this rank's piece at its offset, padded with zeros.
    ZeroPad(Cut),
    /// Returns this rank's piece of the sum.
    ReduceScatter(Cut, ReduceOp),
    /// Sends the pieces of the first cut and joins the pieces of the second.
    AllToAll(Cut, Cut),
    /// Sends rows of dim 0; the counts are per sender and receiver.
    AllToAllSingle(Vec<Dims>),
    /// Moves from the first cut to the second cut of the same dim. Only rows that change ranks are sent.
    Recut(Cut, Cut),
    /// Returns this rank's window of the whole, with zeros outside of the whole.
    Windows(Cut, Vec<Window>),
    /// Returns this rank's piece of the sum of all windows.
    SumsOfWindows(Cut, Vec<Window>),
}

/// The result of a step: new memory, or a view.
enum Made {
    Fresh(Fresh),
    View(Tensor),
}

impl Movement {
    /// Runs the step for the code at `site`.
    fn run(&self, x: &Tensor, group: &ProcessGroup, site: &'static Location<'static>) -> Result<Made> {
        self.check(x, group)?;
        let joined =
            |call: Call, cut: &Cut| Call { dims: smallvec![cut.dim], sizes: smallvec![cut.sizes.clone()], ..call };
        let call = match self {
            Self::Identity => return Ok(Made::View(x.clone())),
            Self::First if group.rank() == 0 => return Ok(Made::View(x.clone())),
            // Not a product with zero, which would keep NaN and infinity.
            Self::First => return Ok(Made::View(x.zeros_like()?)),
            Self::Recut(from, to) => return rows::recut(x, from, to, group, site).map(Made::View),
            Self::Windows(cut, windows) => return rows::windows(x, cut, windows, group, site).map(Made::View),
            Self::SumsOfWindows(cut, windows) => {
                return rows::sums_of_windows(x, cut, windows, group, site).map(Made::View);
            }
            Self::Slice(cut) => {
                let (start, len) = (cut.start(group.rank()), cut.sizes[group.rank()]);
                // candle panics on views without elements that start behind their memory.
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

    /// Returns the shape of the result of `rank` for its tensor of shape `mine`, which must fit the step.
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
            Self::Windows(cut, windows) => shape[cut.dim] = windows[rank].len(),
            Self::SumsOfWindows(cut, _) => shape[cut.dim] = cut.sizes[rank],
        }
        shape
    }

    /// Checks that the pieces fit the tensor and the group, before anything is sent.
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
            Self::Windows(cut, windows) => count(cut) && piece(cut) && windows.len() == group.size(),
            Self::SumsOfWindows(cut, windows) => {
                let len = windows.get(group.rank()).map(Range::len);
                count(cut) && windows.len() == group.size() && x.dims().get(cut.dim).copied() == len
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

/// A forward step with its backward step.
#[derive(Debug, Clone, PartialEq)]
pub struct Exchange {
    name: &'static str,
    forward: Movement,
    backward: Movement,
}

impl Exchange {
    const fn pair(name: &'static str, forward: Movement, backward: Movement) -> Self {
        Self { name, forward, backward }
    }

    /// Sums partial sums to a replicated value, whose gradient is replicated.
    pub const fn all_reduce() -> Self {
        Self::pair("all_reduce", Movement::AllReduce(ReduceOp::Sum), Movement::Identity)
    }

    /// Marks a replicated value that ranks use differently: its gradients are summed.
    pub const fn to_varying() -> Self {
        Self::pair("to_varying", Movement::Identity, Movement::AllReduce(ReduceOp::Sum))
    }

    /// Treats a varying value as invariant: the share of rank 0 becomes the whole gradient.
    pub const fn to_invariant() -> Self {
        Self::pair("to_invariant", Movement::Identity, Movement::First)
    }

    /// Gathers pieces to a whole that ranks use differently.
    pub fn all_gather(cut: Cut) -> Self {
        Self::pair("all_gather", Movement::AllGather(cut.clone()), Movement::ReduceScatter(cut, ReduceOp::Sum))
    }

    /// Gathers pieces to a whole that all ranks use in the same way.
    pub fn all_gather_invariant(cut: Cut) -> Self {
        Self::pair("all_gather", Movement::AllGather(cut.clone()), Movement::Slice(cut))
    }

    /// Cuts an invariant whole into pieces.
    pub fn slice(cut: Cut) -> Self {
        Self::pair("slice", Movement::Slice(cut.clone()), Movement::AllGather(cut))
    }

    /// Cuts a varying whole into pieces.
    pub fn slice_varying(cut: Cut) -> Self {
        Self::pair("slice", Movement::Slice(cut.clone()), Movement::ZeroPad(cut))
    }

    /// Pads pieces to partial sums of the whole.
    pub fn zero_pad(cut: Cut) -> Self {
        Self::pair("zero_pad", Movement::ZeroPad(cut.clone()), Movement::Slice(cut))
    }

    /// Sums partial sums and returns pieces of the sum.
    pub fn reduce_scatter(cut: Cut) -> Self {
        Self::pair("reduce_scatter", Movement::ReduceScatter(cut.clone(), ReduceOp::Sum), Movement::AllGather(cut))
    }

    /// Exchanges pieces of the dim `concat` for pieces of the dim `split`.
    pub fn all_to_all(split: Cut, concat: Cut) -> Self {
        let back = Movement::AllToAll(concat.clone(), split.clone());
        Self::pair("all_to_all", Movement::AllToAll(split, concat), back)
    }

    /// Sends rows of dim 0 to the ranks that need them: `counts[s][r]` rows from rank `s` to rank `r`.
    pub fn all_to_all_single<C: AsRef<[usize]>>(counts: &[C]) -> Self {
        let there: Vec<Dims> = counts.iter().map(|row| Dims::from_slice(row.as_ref())).collect();
        let column = |r: usize| there.iter().map(|row| row.get(r).copied().unwrap_or(0)).collect();
        let back = (0..there.len()).map(column).collect();
        Self::pair("all_to_all_single", Movement::AllToAllSingle(there), Movement::AllToAllSingle(back))
    }

    /// Changes the sizes of pieces of one dim. Rows that stay on their rank are not sent.
    pub fn recut(from: Cut, to: Cut) -> Self {
        Self::pair("recut", Movement::Recut(from.clone(), to.clone()), Movement::Recut(to, from))
    }

    /// Gives each rank a window of the whole: `windows[r]` are the rows of rank `r`, which need not be those of its piece.
    ///
    /// Windows may overlap, as the neighborhoods of a convolution do: a row that several windows have gets the sum of its
    /// gradients. Rows before the first one and behind the last one are zeros. Rows that a rank has are not sent, and
    /// nothing is if no rank lacks some.
    pub fn windows(cut: Cut, windows: Vec<Range<isize>>) -> Self {
        Self::pair("windows", Movement::Windows(cut.clone(), windows.clone()), Movement::SumsOfWindows(cut, windows))
    }

    /// Converts a replicated value to partial sums: rank 0 of the group holds the value, the others hold zeros.
    ///
    /// The sum is thus exact in every dtype, while n shares of one n-th would be rounded. Only `-0` becomes `0`.
    pub const fn to_partial() -> Self {
        Self::pair("to_partial", Movement::First, Movement::Identity)
    }

    /// Converts a varying replicated value to partial sums: rank 0 holds the value, and only its gradient counts.
    pub const fn to_partial_varying() -> Self {
        Self::pair("to_partial", Movement::First, Movement::First)
    }

    /// Returns `result` as the forward result for `x`, with the backward step of this pair. Sends nothing.
    ///
    /// `result` must be equal to the result of the forward step, for example from an earlier call.
    ///
    /// # Errors
    /// If the shape or the dtype differs from that of the forward step's result.
    #[track_caller]
    pub fn with_known_result(self, x: &Tensor, result: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
        self.forward.check(x, group)?;
        let shape = self.forward.result_shape(x.dims(), group.rank());
        if result.dims() != &shape[..] || result.dtype() != x.dtype() {
            let (got, want, dtype) = (result.dims(), shape.as_slice(), x.dtype().as_str());
            let reason =
                format!("a known result of {} {got:?}, but the step returns {want:?} {dtype}", result.dtype().as_str());
            let rank = group.ranks()[group.rank()];
            return Err(Error::InvalidArgument { rank, op: self.name, reason });
        }
        self.record(x, Made::View(result.detach()), group)
    }

    /// Runs the forward step on `x`. The result has a gradient if `x` does.
    ///
    /// The communication of the backward step is attributed to this call site.
    #[track_caller]
    pub fn apply(self, x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
        // The window of one rank may be wider or narrower than the whole.
        if group.size() == 1 && !matches!(self.forward, Movement::Windows(..)) {
            return Ok(x.clone());
        }
        let made = self.forward.run(&x.detach(), group, line_of(Location::caller()))?;
        self.record(x, made, group)
    }

    /// Adds the result of the forward step to the graph.
    ///
    /// The communication is complete before candle takes its read lock on `x`, so no rank waits for another while it
    /// holds a lock. New memory becomes the storage of the result without a copy.
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
        Ok(edges::apply1(x, op)?)
    }
}

/// The graph node of an exchange whose forward step has run.
struct Recorded {
    exchange: Exchange,
    group: ProcessGroup,
    /// The call site of the forward step, because the backward pass has none in the user's code.
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
