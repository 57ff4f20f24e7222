//! RMS norm and layer norm in one launch, and in two to four for their gradients.
use super::call::{FusedCall, KernelText, Scalar, wide};
use super::run::{made, node, threads_of_row};
use candle_core::{D, DType, Result, Shape, Tensor};
use candle_dist_base::{Fresh, edges};

/// The rows of which a block adds up gradients of a weight.
const ROWS_OF_PART: usize = 512;
const MOST_PARTS: usize = 64;

/// The norm of rows `[.., width]`. With a bias it is the layer norm, which takes the mean away.
#[derive(Clone, Copy)]
struct NormSizes {
    rows: usize,
    width: usize,
    dtype: DType,
    is_centered: bool,
}

impl NormSizes {
    fn of(x: &Tensor, is_centered: bool) -> Result<Self> {
        let width = x.dim(D::Minus1)?;
        Ok(Self { rows: x.elem_count() / width, width, dtype: x.dtype(), is_centered })
    }

    fn call<'a>(
        self,
        [of_rms, of_layer]: [&'static str; 2],
        inputs: &'a [Option<&'a Tensor>],
        outputs: &'a [Option<(Shape, DType)>],
        numbers: &'a [Scalar],
    ) -> FusedCall<'a> {
        FusedCall {
            text: KernelText::Norms,
            op: if self.is_centered { of_layer } else { of_rms },
            dtype: self.dtype,
            grid: [self.rows, 1],
            block: [threads_of_row(self.width), 1],
            inputs,
            outputs,
            numbers,
        }
    }
}

/// The RMS norm of rows, or with a bias their layer norm. Tensors have elements, of one dtype.
pub(crate) fn norm(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>, eps: f64) -> Result<Tensor> {
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let bias = bias.map(Tensor::contiguous).transpose()?;
    let [out, kept] = forward(&x, None, &weight, bias.as_ref(), eps)?;
    of_norm(x, weight, bias, out, kept)
}

/// The sum of two tensors of one shape, and the RMS norm of the sum.
pub(crate) fn norm_of_sum(x: &Tensor, more: &Tensor, weight: &Tensor, eps: f64) -> Result<[Tensor; 2]> {
    let [x, more, weight] = [x, more, weight].map(Tensor::contiguous);
    let (x, more, weight) = (x?, more?, weight?);
    let [out, sum, kept] = forward(&x, Some(&more), &weight, None, eps)?;
    let sum = node("add", &[&x, &more], sum, |grad| Ok([Some(grad.clone()), Some(grad.clone()), None]))?;
    let normed = of_norm(sum.clone(), weight, None, out, kept)?;
    Ok([sum, normed])
}

/// The norm, the sum if there is `more`, and what the gradients need of the rows.
fn forward<const N: usize>(
    x: &Tensor,
    more: Option<&Tensor>,
    weight: &Tensor,
    bias: Option<&Tensor>,
    eps: f64,
) -> Result<[Fresh; N]> {
    let sizes = NormSizes::of(x, bias.is_some())?;
    let rows = || Some((x.shape().clone(), x.dtype()));
    let kept = Some((Shape::from((sizes.rows, 2)), wide(x.dtype())));
    let outputs = [rows(), if more.is_some() { rows() } else { None }, kept];
    let numbers = [Scalar::Count(sizes.width), Scalar::Real(eps)];
    let inputs: &[Option<&Tensor>] = match bias {
        None => &[Some(x), more, Some(weight)],
        Some(bias) => &[Some(x), more, Some(weight), Some(bias)],
    };
    made(&sizes.call(["rms_norm", "layer_norm"], inputs, &outputs, &numbers))
}

/// The norm as a node of the graph.
fn of_norm(x: Tensor, weight: Tensor, bias: Option<Tensor>, out: Fresh, kept: Fresh) -> Result<Tensor> {
    let sizes = NormSizes::of(&x, bias.is_some())?;
    let kept = kept.into_tensor();
    let name = if sizes.is_centered { "layer_norm" } else { "rms_norm" };
    let (input, scale, shift) = (x.clone(), weight.clone(), bias.clone());
    let tracked: Vec<&Tensor> = [Some(&x), Some(&weight), bias.as_ref()].into_iter().flatten().collect();
    node(name, &tracked, out, move |grad| {
        let grad = grad.contiguous()?;
        let dx = if input.track_op() {
            edges::keep(&input, of_input(sizes, [&input, &scale, &grad, &kept])?.into_tensor())?
        } else {
            None
        };
        if !scale.track_op() && !shift.as_ref().is_some_and(|shift| shift.track_op()) {
            return Ok([dx, None, None]);
        }
        let (dw, db) = of_parameters(sizes, [&input, &grad, &kept])?;
        let db = match (&shift, db) {
            (Some(shift), Some(db)) => edges::keep(shift, db.into_tensor())?,
            _ => None,
        };
        Ok([dx, edges::keep(&scale, dw.into_tensor())?, db])
    })
}

/// The gradient of the rows, of which `kept` has the sums.
fn of_input(sizes: NormSizes, [x, weight, grad, kept]: [&Tensor; 4]) -> Result<Fresh> {
    let outputs = [Some((x.shape().clone(), x.dtype()))];
    let inputs = [Some(x), Some(weight), Some(grad), Some(kept)];
    let numbers = [Scalar::Count(sizes.width)];
    let [dx] = made(&sizes.call(["rms_norm_input", "layer_norm_input"], &inputs, &outputs, &numbers))?;
    Ok(dx)
}

/// The gradients of the weight, and of the bias if there is one.
fn of_parameters(sizes: NormSizes, [x, grad, kept]: [&Tensor; 3]) -> Result<(Fresh, Option<Fresh>)> {
    let NormSizes { rows, width, dtype, is_centered } = sizes;
    let each = ROWS_OF_PART.max(rows.div_ceil(MOST_PARTS));
    let parts = rows.div_ceil(each);
    let vector = || Some((Shape::from(width), dtype));
    let sums = |count: usize| Some((Shape::from((count, width)), wide(dtype)));
    let outputs: &[_] = match (parts, is_centered) {
        (1, false) => &[None, vector()],
        (1, true) => &[None, vector(), vector()],
        (_, false) => &[sums(parts), None],
        (_, true) => &[sums(2 * parts), None, None],
    };
    let inputs = [Some(x), Some(grad), Some(kept)];
    let numbers = [rows, width, each].map(Scalar::Count);
    let call = sizes.call(["rms_norm_parts", "layer_norm_parts"], &inputs, outputs, &numbers);
    let mut made_here = FusedCall { grid: [width.div_ceil(32), parts], block: [32, 8], ..call }.run()?;
    if parts == 1 {
        let db = if is_centered { made_here.pop() } else { None };
        let [dw] = made_here.try_into().or_else(|_| candle_core::bail!("a norm without a gradient"))?;
        return Ok((dw, db));
    }
    let [sums] = made_here.try_into().or_else(|_| candle_core::bail!("a norm without a gradient"))?;
    let sums = sums.into_tensor();
    let of_half = |half: usize| -> Result<Fresh> {
        let sums = sums.narrow(0, half * parts, parts)?;
        let [sum] = made(&FusedCall {
            text: KernelText::Norms,
            op: "sum_of_parts",
            dtype,
            grid: [width.div_ceil(256), 1],
            block: [256, 1],
            inputs: &[Some(&sums)],
            outputs: &[vector()],
            numbers: &[Scalar::Count(parts), Scalar::Count(width)],
        })?;
        Ok(sum)
    };
    Ok((of_half(0)?, if is_centered { Some(of_half(1)?) } else { None }))
}
