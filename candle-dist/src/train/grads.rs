//! Sums of gradients.
use crate::{empty, sum_dtype};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Result, Tensor, Var};

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
/// let mut accumulator = GradAccumulator::new([&weight]);
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

/// A fact about a gradient, kept with it in the `GradStore`: for example, that ranks have summed it.
///
/// The entry is an empty tensor of integers, which no gradient is. A [`GradAccumulator`](crate::GradAccumulator) hands
/// the marks of all its passes on.
///
/// ```
/// use candle_core::{Device, Var};
/// use candle_dist::{GradAccumulator, GradMark};
///
/// let (weight, is_summed) = (Var::new(1f32, &Device::Cpu)?, GradMark::new()?);
/// let mut grads = weight.sqr()?.backward()?;
/// assert!(!is_summed.is_set(&grads));
/// is_summed.set(&mut grads);
/// let mut accumulator = GradAccumulator::new([&weight]);
/// accumulator.add(&grads)?;
/// accumulator.add(&weight.sqr()?.backward()?)?;
/// assert!(is_summed.is_set(&accumulator.mean()?));
/// # Ok::<(), candle_dist::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct GradMark(Tensor);

impl GradMark {
    /// Creates a mark that differs from all others. Clones are the same mark.
    pub fn new() -> Result<Self> {
        Tensor::zeros(0, DType::U8, &Device::Cpu).map(Self)
    }

    /// Creates a mark of passes whose gradients one of them returns together. A [`GradAccumulator`](crate::GradAccumulator) refuses
    /// unlike weights of them.
    pub fn of_passes() -> Result<Self> {
        Tensor::zeros((0, 0), DType::U8, &Device::Cpu).map(Self)
    }

    /// Sets the mark.
    pub fn set(&self, grads: &mut GradStore) {
        grads.insert(&self.0, self.0.clone());
    }

    /// Returns whether the mark is set.
    pub fn is_set(&self, grads: &GradStore) -> bool {
        grads.get(&self.0).is_some()
    }

    /// Returns whether an entry of a `GradStore` is a mark of [passes](Self::of_passes).
    pub(super) fn is_of_passes(entry: &Tensor) -> bool {
        Self::is_mark(entry) && entry.rank() == 2
    }

    /// Returns whether an entry of a `GradStore` is a mark.
    pub(super) fn is_mark(entry: &Tensor) -> bool {
        entry.dtype() == DType::U8
    }
}
