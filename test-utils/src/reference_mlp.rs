//! Small models on one device: an RMS norm, a two-layer perceptron and a stack of them.

use candle_core::{DType, Device, Result, Tensor, Var};

use crate::reference_ops as ops;
use crate::reference_params::{Linear, Params};

/// RMS norm over the last dim with a weight that starts at 1: `x / √(mean(x²) + eps) · weight`.
#[derive(Clone, Debug)]
pub struct RmsNorm {
    eps: f64,
    weight: Tensor,
    vars: Vec<(String, Var)>,
}

impl RmsNorm {
    /// Creates a norm for inputs of shape `[.., dim]`. Its only parameter is `weight`.
    pub fn new(dim: usize, eps: f64, dtype: DType, device: &Device) -> Result<Self> {
        // Ones need no random numbers, so the seed does not matter.
        let mut params = Params::new(0, dtype, device);
        let weight = params.ones("weight".to_owned(), dim)?;
        Ok(Self { eps, weight, vars: params.into_vars() })
    }

    /// Returns the normalized input, with the same shape.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::rms_norm(x, &self.weight, self.eps)
    }

    /// Returns the parameters by name.
    pub fn vars(&self) -> &[(String, Var)] {
        &self.vars
    }
}

/// `Linear 10→16, ReLU, Linear 16→10`, with parameters `net1.*` and `net2.*`.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use test_utils::reference_mlp::MlpModule;
///
/// # fn main() -> candle_core::Result<()> {
/// let mlp = MlpModule::new(5, true, DType::F32, &Device::Cpu)?;
/// let x = Tensor::ones((3, 10), DType::F32, &Device::Cpu)?;
/// assert_eq!(mlp.forward(&x)?.dims(), [3, 10]);
/// assert_eq!(mlp.vars()[0].0, "net1.weight");
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Debug)]
pub struct MlpModule {
    layer: MlpLayer,
    vars: Vec<(String, Var)>,
}

impl MlpModule {
    /// Creates the perceptron with parameters drawn from `seed`, with or without biases.
    pub fn new(seed: u64, bias: bool, dtype: DType, device: &Device) -> Result<Self> {
        let mut params = Params::new(seed, dtype, device);
        let layer = MlpLayer::new(&mut params, "", bias)?;
        Ok(Self { layer, vars: params.into_vars() })
    }

    /// Maps `[.., 10]` to `[.., 10]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.layer.forward(x)
    }

    /// Resets the parameters to those of a new perceptron with `seed`.
    pub fn reset_parameters(&self, seed: u64) -> Result<()> {
        let bias = self.layer.net1.has_bias();
        set(&self.vars, |dtype, device| Ok(Self::new(seed, bias, dtype, device)?.vars))
    }

    /// Returns the parameters by name, in the order of the layers.
    pub fn vars(&self) -> &[(String, Var)] {
        &self.vars
    }
}

/// A sequence of [`MlpModule`]s, with parameters `layers.0.net1.weight` and so on. All layers have the initial values of
/// an [`MlpModule`] with the same seed.
#[derive(Clone, Debug)]
pub struct MlpStacked {
    layers: Vec<MlpLayer>,
    vars: Vec<(String, Var)>,
}

impl MlpStacked {
    /// Creates a stack of `n_layers` perceptrons with biases.
    pub fn new(seed: u64, n_layers: usize, dtype: DType, device: &Device) -> Result<Self> {
        let mut params = Params::new(seed, dtype, device);
        let layer = |i: usize| {
            let prefix = format!("layers.{i}.");
            params.start_alike_after(&prefix);
            MlpLayer::new(&mut params, &prefix, true)
        };
        let layers = (0..n_layers).map(layer).collect::<Result<_>>()?;
        Ok(Self { layers, vars: params.into_vars() })
    }

    /// Maps `[.., 10]` to `[.., 10]`.
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.layers.iter().try_fold(x.clone(), |x, layer| layer.forward(&x))
    }

    /// Resets the parameters to those of a new stack with `seed`.
    pub fn reset_parameters(&self, seed: u64) -> Result<()> {
        let layers = self.layers.len();
        set(&self.vars, |dtype, device| Ok(Self::new(seed, layers, dtype, device)?.vars))
    }

    /// Returns the parameters by name, in the order of the layers.
    pub fn vars(&self) -> &[(String, Var)] {
        &self.vars
    }
}

/// Sets variables to those that `fresh` makes in the same order.
fn set(
    vars: &[(String, Var)],
    fresh: impl FnOnce(DType, &Device) -> Result<Vec<(String, Var)>>,
) -> Result<()> {
    let Some((_, first)) = vars.first() else { return Ok(()) };
    let fresh = fresh(first.dtype(), first.device())?;
    vars.iter().zip(fresh).try_for_each(|((_, var), (_, fresh))| var.set(&fresh.as_detached_tensor()))
}

#[derive(Clone, Debug)]
struct MlpLayer {
    net1: Linear,
    net2: Linear,
}

impl MlpLayer {
    fn new(params: &mut Params, prefix: &str, bias: bool) -> Result<Self> {
        let net1 = Linear::new(params, &format!("{prefix}net1"), 10, 16, bias)?;
        let net2 = Linear::new(params, &format!("{prefix}net2"), 16, 10, bias)?;
        Ok(Self { net1, net2 })
    }

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.net2.forward(&self.net1.forward(x)?.relu()?)
    }
}
