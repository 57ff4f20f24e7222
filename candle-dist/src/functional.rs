//! Differentiable communication: steps with their transposes.
//!
//! candle differentiates each rank's *local* program. A collective therefore needs a backward step that turns local
//! gradients into those of the global program: its transpose, which is a [`Step`] too.
//!
//! | step | moves | transpose | moves | Megatron-LM |
//! |---|---|---|---|---|
//! | [`AllReduce`](Step::AllReduce) of sums | all_reduce | `ToVarying` | nothing | *g*, *f* |
//! | [`ToInvariant`](Step::ToInvariant) | nothing | `ToPartial` | nothing: rank 0 keeps it, zeros elsewhere | |
//! | [`ToPartial`](Step::ToPartial), varying | nothing | the same | nothing | |
//! | [`AllGather`](Step::AllGather), varying | all_gather | `ReduceScatter` | reduce_scatter | *g-bar* |
//! | [`AllGather`](Step::AllGather), invariant | all_gather | `Slice` | nothing | |
//! | [`Slice`](Step::Slice), varying | nothing | `Pad` | nothing: zeros around the piece | |
//! | [`AllToAll`](Step::AllToAll) | all_to_all | `AllToAll` | all_to_all back | |
//! | [`AllToAllSingle`](Step::AllToAllSingle) | all_to_all_single | `AllToAllSingle` | all_to_all_single back | |
//! | [`Recut`](Step::Recut) | rows that change ranks | `Recut` | the same back | |
//! | [`Windows`](Step::Windows) | rows of other ranks | `SumsOfWindows` | the same back, summed | |
//!
//! *Varying* and *invariant* are the two states of a replicated value. The gradient of a varying value is a partial sum
//! on each rank; the gradient of an invariant value is replicated. Sources: Shoeybi et al. 2019 (arXiv:1909.08053),
//! Korthikanti et al. 2022 (arXiv:2205.05198), and JAX's `shard_map` for the two states.
//!
//! ```
//! use candle_core::{Device, Tensor, Var};
//! use candle_dist::{World, functional::Step};
//!
//! let grads = World::threads(2).run(|ctx| -> candle_dist::Result<Vec<f32>> {
//!     let w = Var::new(&[1f32], &Device::Cpu)?;
//!     let view = Step::ToVarying.apply(&w, ctx.group())?;
//!     let loss = (view * (ctx.rank() + 1) as f64)?; // a different use on every rank
//!     Ok(loss.backward()?.get(&w).unwrap().to_vec1::<f32>()?)
//! })?;
//! assert_eq!(grads, [[3.0], [3.0]]);
//! # Ok::<(), candle_dist::WorldError>(())
//! ```
mod rows;

use crate::backend::{Fresh, Ready, Tensors};
use crate::call::{Call, Collective, Cut, Dims, ReduceOp, line_of, total};
use crate::{Error, ProcessGroup, Result, edges};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Shape, Tensor};
use std::ops::Range;
use std::panic::Location;

/// A step from one layout of a tensor to another, within a group. Its [transpose](Self::transpose) is that of gradients.
///
/// Ranks are those of the group. A step of a group of one rank is free, except for windows and reductions other than sums.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Step {
    /// Nothing changes.
    Identity,
    /// Reduces operands to a replicated value, whose gradient is replicated. Only sums have a gradient.
    AllReduce(ReduceOp),
    /// Marks a replicated value that ranks use differently: its gradients are summed.
    ToVarying,
    /// Treats a varying value as invariant: the share of rank 0 becomes the whole gradient.
    ToInvariant,
    /// Converts a replicated value to the operands of a sum: rank 0 of the group holds the value, the others hold zeros.
    ///
    /// The sum is thus exact in every dtype, while n shares of one n-th would be rounded. Only `-0` becomes `0`. Of a
    /// varying value, only the gradient of rank 0 counts.
    ToPartial {
        /// Whether the value is varying.
        varying: bool,
    },
    /// Gathers pieces to a whole, which is varying if ranks use it differently.
    AllGather {
        /// The pieces of the ranks.
        cut: Cut,
        /// Whether the whole is varying.
        varying: bool,
    },
    /// Cuts a whole into pieces.
    Slice {
        /// The pieces of the ranks.
        cut: Cut,
        /// Whether the whole is varying.
        varying: bool,
    },
    /// Pads pieces to the operands of a sum: zeros where the other pieces are.
    Pad(Cut),
    /// Sums operands, and returns pieces of the sum.
    ReduceScatter(Cut),
    /// Exchanges pieces of one dim for pieces of another.
    AllToAll {
        /// The pieces that are sent.
        split: Cut,
        /// The pieces that are joined.
        concat: Cut,
    },
    /// Sends rows of dim 0 to the ranks that need them: `counts[s][r]` rows from rank `s` to rank `r`.
    AllToAllSingle(Vec<Dims>),
    /// Changes the sizes of the pieces of one dim. Rows that stay on their rank are not sent.
    Recut {
        /// The pieces that there are.
        from: Cut,
        /// The pieces that there will be, of the same dim.
        to: Cut,
    },
    /// Gives each rank a window of the whole: `windows[r]` are the rows of rank `r`, which need not be those of its piece.
    ///
    /// Windows may overlap, as the neighborhoods of a convolution do. Rows before the first one and behind the last one are
    /// zeros. Rows that a rank has are not sent, and nothing is if no rank lacks some.
    Windows {
        /// The pieces of the ranks.
        cut: Cut,
        /// The rows of each rank.
        windows: Vec<Range<isize>>,
    },
    /// Returns pieces, in which each row is the sum of this row in all windows that have it.
    SumsOfWindows {
        /// The pieces of the ranks.
        cut: Cut,
        /// The rows of each rank.
        windows: Vec<Range<isize>>,
    },
}

/// The result of a step: new memory, or a view.
enum StepTensor {
    New(Fresh),
    View(Tensor),
}

impl StepTensor {
    fn into_tensor(self) -> Tensor {
        match self {
            Self::New(fresh) => fresh.into_tensor(),
            Self::View(view) => view,
        }
    }
}

impl Step {
    /// Creates an exchange of `counts[s][r]` rows of dim 0 from each rank `s` to each rank `r`.
    pub fn all_to_all_single<C: AsRef<[usize]>>(counts: &[C]) -> Self {
        Self::AllToAllSingle(counts.iter().map(|row| Dims::from_slice(row.as_ref())).collect())
    }

    /// Returns the name: that of the collective, if there is one.
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Identity => "identity",
            Self::AllReduce(_) => "all_reduce",
            Self::ToVarying => "to_varying",
            Self::ToInvariant => "to_invariant",
            Self::ToPartial { .. } => "to_partial",
            Self::AllGather { .. } => "all_gather",
            Self::Slice { .. } => "slice",
            Self::Pad(_) => "pad",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::AllToAll { .. } => "all_to_all",
            Self::AllToAllSingle(_) | Self::Recut { .. } => "all_to_all_single",
            Self::Windows { .. } => "windows",
            Self::SumsOfWindows { .. } => "sums_of_windows",
        }
    }

    /// Returns the step that gradients take back; `None` for reductions other than sums.
    pub fn transpose(&self) -> Option<Self> {
        Some(match self {
            Self::Identity => Self::Identity,
            Self::AllReduce(ReduceOp::Sum) => Self::ToVarying,
            Self::AllReduce(_) => return None,
            Self::ToVarying => Self::AllReduce(ReduceOp::Sum),
            Self::ToInvariant => Self::ToPartial { varying: false },
            Self::ToPartial { varying: false } => Self::ToInvariant,
            Self::ToPartial { varying: true } => Self::ToPartial { varying: true },
            Self::AllGather { cut, varying: true } => Self::ReduceScatter(cut.clone()),
            Self::AllGather { cut, varying: false } => Self::Slice { cut: cut.clone(), varying: false },
            Self::Slice { cut, varying: true } => Self::Pad(cut.clone()),
            Self::Slice { cut, varying: false } => Self::AllGather { cut: cut.clone(), varying: false },
            Self::Pad(cut) => Self::Slice { cut: cut.clone(), varying: true },
            Self::ReduceScatter(cut) => Self::AllGather { cut: cut.clone(), varying: true },
            Self::AllToAll { split, concat } => {
                Self::AllToAll { split: concat.clone(), concat: split.clone() }
            }
            Self::AllToAllSingle(counts) => {
                let column = |r: usize| counts.iter().map(|row| row.get(r).copied().unwrap_or(0)).collect();
                Self::AllToAllSingle((0..counts.len()).map(column).collect())
            }
            Self::Recut { from, to } => Self::Recut { from: to.clone(), to: from.clone() },
            Self::Windows { cut, windows } => {
                Self::SumsOfWindows { cut: cut.clone(), windows: windows.clone() }
            }
            Self::SumsOfWindows { cut, windows } => {
                Self::Windows { cut: cut.clone(), windows: windows.clone() }
            }
        })
    }

    /// Returns whether one rank alone has the result already. Its window may be wider or narrower than the whole, values may be
    /// multiplied before they are added, and a reduction that is no sum has no gradient.
    const fn is_free_alone(&self) -> bool {
        match self {
            Self::Windows { .. } | Self::SumsOfWindows { .. } => false,
            Self::AllReduce(op) => matches!(op, ReduceOp::Sum),
            _ => true,
        }
    }

    /// Returns the step that the gradient of `x` takes back; `None` if it has none.
    ///
    /// # Errors
    /// If `x` has a gradient and the step has no transpose.
    fn transpose_for(&self, x: &Tensor, group: &ProcessGroup) -> Result<Option<Self>> {
        if !x.track_op() {
            return Ok(None);
        }
        let reason = || format!("{self:?} has no gradient; detach its input, or reduce a sum");
        self.transpose().map(Some).ok_or_else(|| self.invalid(reason(), group))
    }

    /// Returns whether ranks send data to each other. Windows may, if they are not the pieces.
    pub const fn communicates(&self) -> bool {
        !matches!(
            self,
            Self::Identity
                | Self::ToVarying
                | Self::ToInvariant
                | Self::ToPartial { .. }
                | Self::Slice { .. }
                | Self::Pad(_)
        )
    }

    /// Returns the collective that the step is, if it is one.
    fn collective(&self) -> Option<Collective> {
        Some(match self {
            Self::AllReduce(op) => Collective::AllReduce(*op),
            Self::AllGather { cut, .. } => Collective::all_gather(cut.clone()),
            Self::ReduceScatter(cut) => Collective::reduce_scatter(cut.clone(), ReduceOp::Sum),
            Self::AllToAll { split, concat } => {
                Collective::AllToAll { split: split.clone(), concat: concat.clone() }
            }
            Self::AllToAllSingle(counts) => Collective::AllToAllSingle(counts.clone()),
            _ => return None,
        })
    }

    /// Runs the step on `x`. The result has a gradient if `x` does.
    ///
    /// The communication of the backward pass is attributed to this call site.
    ///
    /// # Errors
    /// If the pieces do not fit the tensor or the group, before anything is sent; if the communication fails; if `x` has a
    /// gradient and the step has no transpose.
    #[track_caller]
    pub fn apply(&self, x: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
        if group.size() == 1 && self.is_free_alone() {
            return Ok(x.clone());
        }
        let transpose = self.transpose_for(x, group)?;
        let output = self.run(&x.detach(), group, line_of(Location::caller()))?;
        self.record(x, output, transpose, group)
    }

    /// Returns `result` as the result of this step for `x`, with the gradient of the step. Sends nothing.
    ///
    /// `result` must be equal to the result of the step, for example from an earlier call.
    ///
    /// # Errors
    /// If the shape or the dtype differs from that of the step's result.
    #[track_caller]
    pub fn with_known_result(&self, x: &Tensor, result: &Tensor, group: &ProcessGroup) -> Result<Tensor> {
        self.check(self.collective().as_ref(), x, group)?;
        let shape = self.output(x.dims(), group.rank());
        if result.dims() != &shape[..] || result.dtype() != x.dtype() {
            let (got, want, dtype) = (result.dims(), shape.as_slice(), x.dtype().as_str());
            let reason = format!(
                "a known result of {} {got:?}, but the step returns {want:?} {dtype}",
                result.dtype().as_str()
            );
            return Err(self.invalid(reason, group));
        }
        let transpose = self.transpose_for(x, group)?;
        self.record(x, StepTensor::View(result.detach()), transpose, group)
    }

    /// Runs the step for the code at `site`, without gradient.
    fn run(&self, x: &Tensor, group: &ProcessGroup, site: &'static Location<'static>) -> Result<StepTensor> {
        let collective = self.collective();
        self.check(collective.as_ref(), x, group)?;
        if let Some(collective) = collective {
            let call = Call { site, ..Call::on(collective, x) };
            let made = group.exchange(call, std::slice::from_ref(x), Tensors::new())?;
            let made = made.and_then(|mut made| made.pop());
            return Ok(made.map_or_else(|| StepTensor::View(x.clone()), StepTensor::New));
        }
        Ok(StepTensor::View(match self {
            // Not a product with zero, which would keep NaN and infinity.
            Self::ToPartial { .. } if group.rank() > 0 => x.zeros_like()?,
            Self::Recut { from, to } => rows::recut(x, from, to, group, site)?,
            Self::Windows { cut, windows } => rows::windows(x, cut, windows, group, site)?,
            Self::SumsOfWindows { cut, windows } => rows::sums_of_windows(x, cut, windows, group, site)?,
            Self::Slice { cut, .. } => rows::part(x, cut.dim, &cut.piece(group.rank()))?,
            Self::Pad(cut) => {
                let piece = cut.piece(group.rank());
                x.pad_with_zeros(cut.dim, piece.start, cut.len() - piece.end)?
            }
            _ => x.clone(),
        }))
    }

    /// Returns the shape of the result of `rank` for its tensor of shape `input`, which must fit the step.
    fn output(&self, input: &[usize], rank: usize) -> Dims {
        if let Some(collective) = self.collective() {
            return collective.output(0, input, rank);
        }
        let mut shape = Dims::from_slice(input);
        match self {
            Self::Pad(cut) => shape[cut.dim] = cut.len(),
            Self::Slice { cut, .. } | Self::SumsOfWindows { cut, .. } => shape[cut.dim] = cut.sizes[rank],
            Self::Recut { to, .. } => shape[to.dim] = to.sizes[rank],
            Self::Windows { cut, windows } => shape[cut.dim] = windows[rank].len(),
            _ => {}
        }
        shape
    }

    /// Checks that the pieces fit the tensor and the group, before anything is sent.
    fn check(&self, collective: Option<&Collective>, x: &Tensor, group: &ProcessGroup) -> Result<()> {
        let (shape, rank, size) = (x.dims(), group.rank(), group.size());
        let fits = match self {
            Self::Slice { cut, .. } => cut.check_whole(shape, size),
            Self::Pad(cut) => cut.check_piece(shape, rank, size),
            Self::Recut { from, to } => from.check_piece(shape, rank, size).and_then(|()| {
                let fits =
                    from.dim == to.dim && to.sizes.len() == size && total(&from.sizes) == total(&to.sizes);
                if fits { Ok(()) } else { Err(format!("pieces {from:?} cannot become {to:?}")) }
            }),
            Self::Windows { cut, windows } => cut
                .check_piece(shape, rank, size)
                .and_then(|()| if windows.len() == size { Ok(()) } else { Err(not_for_each(windows, size)) }),
            Self::SumsOfWindows { cut, windows } => {
                let len = windows.get(rank).map(Range::len);
                let counts = windows.len() == size && cut.sizes.len() == size && total(&cut.sizes).is_some();
                let fits = counts && shape.get(cut.dim).copied() == len;
                if fits { Ok(()) } else { Err(not_for_each(windows, size)) }
            }
            _ => collective.map_or(Ok(()), |collective| collective.check(0, shape, rank, size)),
        };
        fits.map_err(|reason| self.invalid(reason, group))
    }

    fn invalid(&self, reason: String, group: &ProcessGroup) -> Error {
        Error::InvalidArgument { rank: group.ranks()[group.rank()], op: self.name(), reason }
    }

    /// Adds the result of the step to the graph.
    ///
    /// The communication is complete before candle takes its read lock on `x`, so no rank waits for another while it
    /// holds a lock. New memory becomes the storage of the result without a copy.
    #[track_caller]
    fn record(
        &self,
        x: &Tensor,
        output: StepTensor,
        transpose: Option<Self>,
        group: &ProcessGroup,
    ) -> Result<Tensor> {
        let Some(transpose) = transpose else { return Ok(output.into_tensor()) };
        let fresh = match output {
            StepTensor::New(fresh) => fresh,
            StepTensor::View(view) => Fresh::copy_of(&view)?,
        };
        let (name, group, site) = (self.name(), group.clone(), Location::caller());
        Ok(edges::apply1(x, StepNode { name, transpose, group, site, result: Ready::new(fresh) })?)
    }
}

fn not_for_each(windows: &[Range<isize>], size: usize) -> String {
    format!("windows {windows:?} do not fit {size} ranks and this piece")
}

/// The graph node of a step that has run.
struct StepNode {
    name: &'static str,
    transpose: Step,
    group: ProcessGroup,
    /// The call site of the step, because the backward pass has none in the user's code.
    site: &'static Location<'static>,
    result: Ready,
}

impl CustomOp1 for StepNode {
    fn name(&self) -> &'static str {
        self.name
    }

    fn cpu_fwd(&self, _: &CpuStorage, _: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        self.result.cpu()
    }

    fn cuda_fwd(&self, _: &CudaStorage, _: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        self.result.cuda()
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(self.transpose.run(grad, &self.group, self.site)?.into_tensor()))
    }
}
