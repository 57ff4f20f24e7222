//! Sums of gradients.
use crate::{empty, sum_dtype};
use candle_core::backprop::GradStore;
use candle_core::{Result, Tensor, Var};

/// Adds a gradient to a sum, which holds no graph. Without a sum, starts one.
///
/// The sum is kept in [`sum_dtype`] of the gradient, so sums of bf16 gradients are f32.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::add_grad;
///
/// let small = Tensor::full(1f32 / 256., 1, &Device::Cpu)?.to_dtype(DType::BF16)?;
/// let mut sum = add_grad(None, &Tensor::ones(1, DType::BF16, &Device::Cpu)?)?;
/// for _ in 0..256 {
///     sum = add_grad(Some(&sum), &small)?;
/// }
/// assert_eq!(sum.to_vec1::<f32>()?, [2.0]); // in bf16, 1 + 1/256 is 1
/// # Ok::<(), candle_core::Error>(())
/// ```
pub fn add_grad(sum: Option<&Tensor>, grad: &Tensor) -> Result<Tensor> {
    let dtype = sum_dtype(grad.dtype());
    let convert = |grad: &Tensor| empty::compute(&grad.detach(), |grad| grad.to_dtype(dtype));
    let grad = convert(grad)?;
    match sum {
        Some(sum) => Ok((convert(sum)? + grad)?.detach()),
        None => Ok(grad),
    }
}

/// Rounds gradients to the dtypes of their variables, for optimizers that accept no others, such as those of candle-nn.
///
/// Gradients that this workspace sums over passes, ranks or units are f32 for 16-bit variables.
///
/// ```
/// use candle_core::{DType, Device, Var};
/// use candle_dist::{GradAccumulator, round_grads};
///
/// let weight = Var::ones(1, DType::BF16, &Device::Cpu)?;
/// let mut accumulator = GradAccumulator::default();
/// accumulator.add(&weight.sum_all()?.backward()?)?;
/// let mut grads = accumulator.mean()?;
/// assert_eq!(grads.get(&weight).map(|grad| grad.dtype()), Some(DType::F32));
/// round_grads(&mut grads, [&weight])?;
/// assert_eq!(grads.get(&weight).map(|grad| grad.dtype()), Some(DType::BF16));
/// # Ok::<(), candle_dist::Error>(())
/// ```
pub fn round_grads<'a>(grads: &mut GradStore, vars: impl IntoIterator<Item = &'a Var>) -> Result<()> {
    for var in vars {
        if let Some(grad) = grads.remove(var) {
            grads.insert(var, empty::compute(&grad, |grad| grad.to_dtype(var.dtype()))?);
        }
    }
    Ok(())
}
