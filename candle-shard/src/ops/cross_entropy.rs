//! Cross entropy over classes that may be sharded. Means are over the global batch.
use super::lookup::{Indexes, read_indexes_once};
use super::neutral;
use crate::layout::{Placement, Replicate, Shard};
use crate::ops::loss::{Reduction, loss_dtype};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::strict::inherent;
use crate::{DTensor, Error, Result, kernels};
use candle_core::{DType, Tensor};
use candle_dist::functional::Step;
use candle_dist::{ReduceOp, empty};
use smallvec::SmallVec;
use std::ops::Range;

const SUM: Placement = Placement::PARTIAL_SUM;

/// The cross entropy with its options, as PyTorch's `cross_entropy` and `nll_loss` define them.
///
/// The loss of a row with target `y` is `-(1 - ε)·w[y]·ln p[y] - ε/C·Σ w[c]·ln p[c]` with class weights `w` and label
/// smoothing `ε`. The mean divides by the sum of `w[y]` over all rows that count, on all ranks.
///
/// A sharded class dim stays sharded (Shoeybi et al. 2019). The ranks exchange the largest logit and the sum of the
/// exponentials per row, and nothing in the backward pass.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{CrossEntropy, DTensor, Replicate, Result, Shard};
///
/// let losses = World::threads(2).run(|ctx| -> Result<f64> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let logits = Tensor::new(&[[0f64, 0., 0., 0.], [1., 2., 3., 4.]], &Device::Cpu)?;
///     let logits = DTensor::distribute(&logits, &mesh, &[Shard(1)])?;
///     let targets = DTensor::distribute(&Tensor::new(&[1i64, -100], &Device::Cpu)?, &mesh, &[Replicate])?;
///     let loss = CrossEntropy { ignore_index: Some(-100), ..Default::default() };
///     Ok(loss.of_logits(&logits, &targets)?.full_tensor()?.to_scalar()?)
/// })?;
/// assert_eq!(losses, [4f64.ln(); 2]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[derive(Debug, Clone, Default)]
pub struct CrossEntropy {
    /// The target of rows that are ignored.
    pub ignore_index: Option<i64>,
    /// A weight per class, `[classes]`, without gradient. The default is 1 for each class.
    pub class_weights: Option<DTensor>,
    /// The share of the loss that is spread evenly over all classes, in `[0, 1]`.
    pub label_smoothing: f64,
    /// How the losses of the rows are reduced.
    pub reduction: Reduction,
}

impl DTensor {
    /// The mean cross entropy of these logits `[.., classes]` against `targets` (u32 or i64, `[..]`). A scalar.
    ///
    /// All dims may be sharded; see [`CrossEntropy`] for options.
    #[track_caller]
    pub fn cross_entropy(&self, targets: &Self) -> Result<Self> {
        CrossEntropy::default().of_logits(self, targets)
    }
}

impl CrossEntropy {
    /// The loss of logits `[.., classes]` against `targets` (u32 or i64, `[..]`): a scalar, or `[..]` without a reduction.
    ///
    /// # Errors
    /// If shapes or dtypes do not agree, the label smoothing is not in `[0, 1]`, or a target is neither a class nor
    /// `ignore_index`. Such a target in a shard of the targets stops the world, with the same error on all ranks.
    #[track_caller]
    pub fn of_logits(&self, logits: &DTensor, targets: &DTensor) -> Result<DTensor> {
        if !(0.0..=1.0).contains(&self.label_smoothing) {
            let reason =
                format!("label smoothing {}: expected at least 0 and at most 1", self.label_smoothing);
            return Error::op("cross_entropy", reason);
        }
        let device = logits.device();
        self.run("cross_entropy", logits, targets, &|x, goals| {
            let (logits, class_dim) = (&x[0], x[0].rank() - 1);
            // Ranks without logits compute on the host, but exchange on the same device as the others.
            let local = logits.to_local().to_device(device)?;
            let flat = local.reshape((goals.rows.len(), local.dims()[class_dim]))?;
            let axes: SmallVec<[usize; 2]> = logits.sharded_axes(class_dim).collect();
            let join = |values: &Tensor, op| join(values, op, logits, &axes).map_err(Into::into);
            self.reduced(&kernels::weighted_cross_entropy(&flat, goals, &join)?, &x[1])
        })
    }

    /// The loss of log probabilities `[.., classes]` against `targets` (u32 or i64, `[..]`): a scalar, or `[..]` without a reduction.
    ///
    /// # Errors
    /// Those of [`of_logits`](Self::of_logits), and one if there is label smoothing.
    #[track_caller]
    pub fn of_log_probabilities(&self, log_probabilities: &DTensor, targets: &DTensor) -> Result<DTensor> {
        if self.label_smoothing != 0.0 {
            let reason = format!("label smoothing {}: only of_logits takes it", self.label_smoothing);
            return Error::op("nll_loss", reason);
        }
        self.run("nll_loss", log_probabilities, targets, &|x, goals| {
            let local = x[0].to_local();
            let (rows, classes) = (goals.rows.len(), local.dims()[x[0].rank() - 1]);
            if rows * classes == 0 {
                let dims = if self.reduction == Reduction::None { x[1].to_local().dims() } else { &[] };
                return neutral(&x[..1], dims, loss_dtype(x[0].dtype()));
            }
            let index = goals.rows.iter().map(|goal| goal.class.unwrap_or(0) as u32);
            let index = Tensor::from_iter(index, local.device())?.unsqueeze(1)?;
            let picked = local.reshape((rows, classes))?.contiguous()?.gather(&index, 1)?.squeeze(1)?;
            let picked = picked.to_dtype(loss_dtype(x[0].dtype()))?;
            // Rows whose class is on another rank, or ignored, add nothing even where they are infinite.
            let here = Tensor::from_iter(
                goals.rows.iter().map(|goal| u8::from(goal.class.is_some())),
                local.device(),
            )?;
            let weights = Tensor::from_iter(goals.rows.iter().map(|goal| -goal.peak), local.device())?;
            let picked = here.where_cond(&picked, &picked.zeros_like()?)?;
            self.reduced(&(picked * weights.to_dtype(loss_dtype(x[0].dtype()))?)?, &x[1])
        })
    }

    /// The losses `[rows]` of this rank's classes as they leave the op: their sum, or in the shape of its `targets`.
    fn reduced(&self, losses: &Tensor, targets: &DTensor) -> Result<Tensor> {
        Ok(match self.reduction {
            Reduction::None => losses.reshape(targets.to_local().dims())?,
            _ => empty::compute(losses, Tensor::sum_all)?,
        })
    }

    fn signature(
        &self,
        op: &'static str,
        scores: &DTensor,
        targets: &DTensor,
        weights: Option<&DTensor>,
    ) -> Result<Signature> {
        let Some((&classes, leading)) = scores.dims().split_last() else {
            return Error::op(op, format!("logits {}: expected [.., classes]", scores.spec()));
        };
        scores.check_float(op)?;
        if targets.dims() != leading || !matches!(targets.dtype(), DType::U32 | DType::I64) {
            let reason = format!(
                "targets {} for logits {}: expected {leading:?} u32 or i64",
                targets.spec(),
                scores.spec()
            );
            return Error::op(op, reason);
        }
        if let Some(weights) = weights.filter(|w| w.dims() != [classes] || !w.dtype().is_float()) {
            let reason = format!(
                "class weights {} for logits {}: expected floats [{classes}]",
                weights.spec(),
                scores.spec()
            );
            return Error::op(op, reason);
        }
        let row = |score, target, out| ShardingRule {
            out,
            ins: [score, target].into_iter().chain(weights.map(|_| Replicate)).collect(),
        };
        let is_whole = self.reduction == Reduction::None;
        let out = |d| if is_whole { Shard(d) } else { SUM };
        let mut rows: ShardingRules = (0..leading.len()).map(|d| row(Shard(d), Shard(d), out(d))).collect();
        rows.push(row(Shard(leading.len()), Replicate, SUM));
        Ok(Signature::new(rows, if is_whole { leading } else { &[] }, loss_dtype(scores.dtype())))
    }

    /// Reduces a loss; `local` is its sum over the rows and classes of this rank, or over the classes alone.
    #[track_caller]
    fn run(
        &self,
        op: &'static str,
        scores: &DTensor,
        targets: &DTensor,
        local: &dyn Fn(&[DTensor], kernels::Goals) -> Result<Tensor>,
    ) -> Result<DTensor> {
        let weights = self.class_weights.as_ref().map(DTensor::detach);
        let known = Indexes::default();
        let inputs: SmallVec<[&DTensor; 3]> = [scores, targets].into_iter().chain(&weights).collect();
        let signature = || self.signature(op, scores, targets, weights.as_ref());
        let made = rules::run(op, &[self.reduction as usize], &inputs, signature, |x, _| {
            let goals = self.goals(op, &x[0], [targets, &x[1]], x.get(2), &known)?;
            local(x, goals)
        })?;
        let loss = match self.reduction {
            Reduction::Sum | Reduction::None => made,
            Reduction::Mean if self.ignore_index.is_none() && weights.is_none() => {
                made.affine(1.0 / targets.elem_count() as f64, 0.0)?
            }
            Reduction::Mean => {
                let total = self.total_weight(op, scores, targets, weights.as_ref(), &known)?;
                inherent(|| made.div(&total))?
            }
        };
        inherent(|| loss.to_dtype(scores.dtype()))
    }

    /// The sum of the weights of all targets that count.
    #[track_caller]
    fn total_weight(
        &self,
        op: &'static str,
        scores: &DTensor,
        targets: &DTensor,
        weights: Option<&DTensor>,
        known: &Indexes,
    ) -> Result<DTensor> {
        let inputs: SmallVec<[&DTensor; 2]> = [targets].into_iter().chain(weights).collect();
        let dtype = loss_dtype(scores.dtype());
        let signature = || {
            let row = |d| ShardingRule {
                out: SUM,
                ins: [Shard(d)].into_iter().chain(weights.map(|_| Replicate)).collect(),
            };
            Ok(Signature::new((0..targets.rank()).map(row).collect(), &[], dtype))
        };
        rules::run("total weight of targets", &[dtype as usize], &inputs, signature, |x, _| {
            let ClassTargets { classes, weights } =
                self.read(op, [targets, &x[0]], scores.dims()[scores.rank() - 1], x.get(1), known)?;
            let total: f64 = classes.iter().flatten().map(|&class| weight_of(&weights, class)).sum();
            Ok(Tensor::new(total, x[0].device())?.to_dtype(dtype)?)
        })
    }

    /// The classes and weights of the rows on this rank, which holds the classes of its shard of `scores`.
    #[track_caller]
    fn goals(
        &self,
        op: &'static str,
        scores: &DTensor,
        targets: [&DTensor; 2],
        weights: Option<&DTensor>,
        known: &Indexes,
    ) -> Result<kernels::Goals> {
        let class_dim = scores.rank() - 1;
        let classes = scores.dims()[class_dim];
        let held: Range<usize> = scores.spec().local_block()[class_dim].clone();
        let targets = self.read(op, targets, classes, weights, known)?;
        let (smooth, weights) = (self.label_smoothing, targets.weights);
        let goal = |class: Option<usize>| match class {
            Some(class) => kernels::Goal {
                class: held.contains(&class).then(|| class - held.start),
                peak: (1.0 - smooth) * weight_of(&weights, class),
                spread: if smooth == 0.0 { 0.0 } else { 1.0 },
            },
            None => kernels::Goal { class: None, peak: 0.0, spread: 0.0 },
        };
        let spread = |class| smooth / classes as f64 * weight_of(&weights, class);
        let (here, everywhere) = if smooth == 0.0 { (0..0, 0..0) } else { (held.clone(), 0..classes) };
        Ok(kernels::Goals {
            rows: targets.classes.into_iter().map(goal).collect(),
            spread: here.map(spread).collect(),
            spread_total: everywhere.map(spread).sum(),
        })
    }

    /// The targets (as given, and as laid out by an op), and the weights of the local classes.
    #[track_caller]
    fn read(
        &self,
        op: &'static str,
        targets: [&DTensor; 2],
        classes: usize,
        weights: Option<&DTensor>,
        known: &Indexes,
    ) -> Result<ClassTargets> {
        let class_of = |target: i64| match usize::try_from(target) {
            _ if Some(target) == self.ignore_index => Ok(None),
            Ok(class) if class < classes => Ok(Some(class)),
            _ => {
                Err(format!("target {target} is outside the {classes} classes 0..{classes}, and not ignored"))
            }
        };
        let classes = read_indexes_once(op, targets, known, class_of)?;
        let weights = weights.map(|w| w.to_local().to_dtype(DType::F64)?.to_vec1()).transpose()?;
        Ok(ClassTargets { classes, weights })
    }
}

struct ClassTargets {
    /// The class of each row; `None` if it is ignored.
    classes: Vec<Option<usize>>,
    /// The weight of each class, if they differ.
    weights: Option<Vec<f64>>,
}

fn weight_of(weights: &Option<Vec<f64>>, class: usize) -> f64 {
    weights.as_ref().map_or(1.0, |weights| weights[class])
}

/// Reduces `values` over the ranks that hold the other classes. The gradient of a sum is summed over them too.
fn join(values: &Tensor, op: ReduceOp, logits: &DTensor, axes: &[usize]) -> Result<Tensor> {
    axes.iter().try_fold(values.clone(), |values, &axis| {
        let group = &logits.described(logits.mesh().axis_group(axis)?.clone(), 1 << axis);
        Ok(match op {
            ReduceOp::Sum => Step::ToVarying.apply(&Step::AllReduce(op).apply(&values, group)?, group)?,
            _ => group.all_reduce(&values, op)?,
        })
    })
}
