//! The cross entropy of logits of which a rank may have some of the classes, in three launches with the gradient.
use super::call::{FusedCall, KernelText, Scalar, wide};
use super::run::{made, node, threads_of_row};
use candle_core::{Device, Result, Shape, Tensor};
use candle_dist_base::{ReduceOp, edges, empty};

/// Reduces `[n]` over the pieces of the classes.
pub(crate) type JoinPieces<'a> = dyn Fn(&Tensor, ReduceOp) -> Result<Tensor> + 'a;

/// The weights of the losses of rows.
pub(crate) struct LossWeights<'a> {
    /// The targets among the classes here; `None` if it is elsewhere.
    pub(crate) targets: Vec<Option<usize>>,
    /// How much the targets weigh.
    pub(crate) peaks: Vec<f64>,
    /// How much all classes weigh in each row.
    pub(crate) shares: Vec<f64>,
    /// The weight of each class here, or empty if all are 0.
    pub(crate) spread: &'a [f64],
    /// The sum of the weights of all classes.
    pub(crate) total: f64,
}

/// The weights of losses on the device of the logits.
struct DeviceWeights {
    targets: Tensor,
    peaks: Tensor,
    /// How much all classes weigh in each row, and each of them; `None` if they do not.
    shares: Option<[Tensor; 2]>,
    total: f64,
}

impl DeviceWeights {
    fn new(weights: &LossWeights<'_>, logits: &Tensor) -> Result<Self> {
        let (device, dtype) = (logits.device(), wide(logits.dtype()));
        let numbers = |numbers: &[f64]| -> Result<Tensor> {
            Tensor::from_slice(numbers, numbers.len(), &Device::Cpu)?.to_dtype(dtype)?.to_device(device)
        };
        let LossWeights { targets, peaks, shares, spread, total } = weights;
        let target = |class: &Option<usize>| class.map_or(u32::MAX, |class| class as u32);
        let targets: Vec<u32> = targets.iter().map(target).collect();
        let shares = match spread.is_empty() {
            true => None,
            false => Some([numbers(shares)?, numbers(spread)?]),
        };
        let targets = Tensor::from_slice(&targets, targets.len(), device)?;
        Ok(Self { targets, peaks: numbers(peaks)?, shares, total: *total })
    }

    fn inputs(&self) -> [Option<&Tensor>; 4] {
        let [shares, spread] =
            self.shares.as_ref().map_or([None; 2], |[shares, spread]| [Some(shares), Some(spread)]);
        [Some(&self.targets), Some(&self.peaks), shares, spread]
    }
}

/// As [`weighted`], of a piece without elements. It joins what the others do, without a graph, as theirs is.
pub(crate) fn of_nothing(logits: &Tensor, join: &JoinPieces<'_>) -> Result<Tensor> {
    let (rows, dtype, device) = (logits.dim(0)?, wide(logits.dtype()), logits.device());
    join(&empty::full(f64::NEG_INFINITY, rows, dtype, device)?, ReduceOp::Max)?;
    join(&Tensor::zeros(rows, dtype, device)?, ReduceOp::Sum)?;
    empty::zeros_of(&[logits], rows, dtype)
}

/// See [`weighted_cross_entropy`](crate::cross_entropy::weighted_cross_entropy). The logits have elements.
pub(crate) fn weighted(logits: &Tensor, weights: &LossWeights<'_>, join: &JoinPieces<'_>) -> Result<Tensor> {
    let x = logits.contiguous()?;
    let (rows, classes) = x.dims2()?;
    let (dtype, sums) = (x.dtype(), wide(x.dtype()));
    let text = KernelText::CrossEntropy;
    let (grid, block) = ([rows, 1], [threads_of_row(classes), 1]);
    let of_rows = || Some((Shape::from(rows), sums));
    let [here, partial] = made(&FusedCall {
        text,
        op: "cross_entropy_normalizer",
        dtype,
        grid,
        block,
        inputs: &[Some(&x)],
        outputs: &[of_rows(), of_rows()],
        numbers: &[Scalar::Count(classes)],
    })?;
    let (here, partial) = (here.into_tensor(), partial.into_tensor());
    let top = join(&here, ReduceOp::Max)?;
    // One piece has all classes, and its largest logit is that of all.
    let is_alone = top.id() == here.id();
    let norm = join(&if is_alone { partial } else { (partial * (here - &top)?.exp()?)? }, ReduceOp::Sum)?;
    let (top, norm, weights) = (top.detach(), norm.detach(), DeviceWeights::new(weights, &x)?);
    let outputs = [of_rows()];
    let [targets, peaks, shares, spread] = weights.inputs();
    let [loss] = made(&FusedCall {
        text,
        op: "cross_entropy",
        dtype,
        grid,
        block,
        inputs: &[Some(&x), Some(&top), Some(&norm), targets, peaks, shares, spread],
        outputs: &outputs,
        numbers: &[Scalar::Count(classes)],
    })?;
    let input = x.clone();
    node("cross_entropy", &[&x], loss, move |grad| {
        let grad = grad.contiguous()?;
        let [targets, peaks, shares, spread] = weights.inputs();
        let [dx] = made(&FusedCall {
            text,
            op: "cross_entropy_input",
            dtype,
            grid,
            block,
            inputs: &[Some(&input), Some(&top), Some(&norm), targets, peaks, shares, spread, Some(&grad)],
            outputs: &[Some((input.shape().clone(), dtype))],
            numbers: &[Scalar::Count(classes), Scalar::Real(weights.total)],
        })?;
        Ok([edges::keep(&input, dx.into_tensor())?, None, None])
    })
}
