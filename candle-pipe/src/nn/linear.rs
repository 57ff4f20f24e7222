//! The linear layer with a deferrable weight gradient.
use candle_core::{Result, Tensor};
use candle_nn::{Module, VarBuilder};

/// `y = x · weightᵀ + bias`, like candle's layer and with the same parameters. In a stage,
/// [`Tape::backward_inputs`](crate::Tape::backward_inputs) defers its weight gradient.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_nn::{Module, VarBuilder};
///
/// let vb = VarBuilder::zeros(DType::F32, &Device::Cpu);
/// let layer = candle_pipe::nn::linear(2, 3, vb)?;
/// assert_eq!(layer.forward(&Tensor::ones((4, 5, 2), DType::F32, &Device::Cpu)?)?.dims(), [4, 5, 3]);
/// # Ok::<(), candle_core::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
}

impl Linear {
    /// Creates a layer with a `weight` `[n, k]` and an optional `bias` `[n]`.
    pub fn new(weight: Tensor, bias: Option<Tensor>) -> Self {
        Self { weight, bias }
    }

    /// Returns the weight `[n, k]`.
    pub fn weight(&self) -> &Tensor {
        &self.weight
    }

    /// Returns the bias `[n]`, if there is one.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }
}

impl From<candle_nn::Linear> for Linear {
    fn from(layer: candle_nn::Linear) -> Self {
        Self::new(layer.weight().clone(), layer.bias().cloned())
    }
}

impl Module for Linear {
    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        deferred_linear(x, &self.weight, self.bias.as_ref())
    }
}

/// Builds a layer with parameters `weight` and `bias`, initialized as candle's.
pub fn linear(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    candle_nn::linear(in_dim, out_dim, vb).map(Linear::from)
}

/// Builds a layer with the parameter `weight`, initialized as candle's.
pub fn linear_no_bias(in_dim: usize, out_dim: usize, vb: VarBuilder<'_>) -> Result<Linear> {
    candle_nn::linear_no_bias(in_dim, out_dim, vb).map(Linear::from)
}

/// `x · weightᵀ + bias`: `[.., k]` by `[n, k]`, plus `[n]`, gives `[.., n]`.
///
/// In a stage, if `weight` is a variable of that stage, its gradient can be deferred. Elsewhere this is an ordinary
/// differentiable function.
///
/// # Errors
/// If shapes, dtypes or devices do not agree.
pub fn deferred_linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    candle_dist_kernels::linear(x, weight, bias)
}
