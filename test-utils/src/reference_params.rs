//! The parameters of the reference models: their names and initial values.

use candle_core::{DType, Device, Result, Tensor, Var};
use candle_shard::random::{Distribution, Stream, sample_full};

use crate::reference_ops::Arithmetic;

/// Creates parameters, each from the random stream of its full name, and stores them in order.
pub(crate) struct Params {
    seed: u64,
    dtype: DType,
    device: Device,
    vars: Vec<(String, Var)>,
    arithmetic: Arithmetic,
    /// What names begin with and draws leave out.
    left_out: String,
}

impl Params {
    pub(crate) fn new(seed: u64, dtype: DType, device: &Device) -> Self {
        Self {
            seed,
            dtype,
            device: device.clone(),
            vars: Vec::new(),
            arithmetic: Arithmetic::default(),
            left_out: String::new(),
        }
    }

    /// Sets the arithmetic of the layers.
    pub(crate) fn computing(self, arithmetic: Arithmetic) -> Self {
        Self { arithmetic, ..self }
    }

    /// From here on, parameters whose names differ in this beginning alone start alike.
    pub(crate) fn start_alike_after(&mut self, prefix: &str) {
        prefix.clone_into(&mut self.left_out);
    }

    pub(crate) fn arithmetic(&self) -> Arithmetic {
        self.arithmetic
    }

    pub(crate) fn into_vars(self) -> Vec<(String, Var)> {
        self.vars
    }

    /// Draws the parameter `name` from `dist`.
    pub(crate) fn draw(&mut self, name: String, shape: &[usize], dist: Distribution) -> Result<Tensor> {
        let stream = Stream::new(self.seed, name.strip_prefix(&self.left_out).unwrap_or(&name));
        let init = sample_full(stream, dist, shape, self.dtype, &self.device)?;
        self.register(name, &init)
    }

    /// Creates the parameter `name` with all ones.
    pub(crate) fn ones(&mut self, name: String, size: usize) -> Result<Tensor> {
        let init = Tensor::ones(size, self.dtype, &self.device)?;
        self.register(name, &init)
    }

    fn zeros(&mut self, name: String, size: usize) -> Result<Tensor> {
        let init = Tensor::zeros(size, self.dtype, &self.device)?;
        self.register(name, &init)
    }

    fn register(&mut self, name: String, init: &Tensor) -> Result<Tensor> {
        let var = Var::from_tensor(init)?;
        // The tensor shares the Var's storage and id, so it sees every update, and gradients reach the Var through it.
        let tensor = var.as_tensor().clone();
        self.vars.push((name, var));
        Ok(tensor)
    }
}

/// `y = x · weightᵀ + bias`, initialized uniformly in ±1/√in as in PyTorch.
#[derive(Clone, Debug)]
pub(crate) struct Linear {
    weight: Tensor,
    bias: Option<Tensor>,
    arithmetic: Arithmetic,
}

impl Linear {
    pub(crate) fn new(
        params: &mut Params,
        path: &str,
        in_dim: usize,
        out_dim: usize,
        bias: bool,
    ) -> Result<Self> {
        let bound = 1.0 / (in_dim as f64).sqrt();
        let dist = Distribution::Uniform { lo: -bound, up: bound };
        let weight = params.draw(format!("{path}.weight"), &[out_dim, in_dim], dist)?;
        let bias = bias.then(|| params.draw(format!("{path}.bias"), &[out_dim], dist)).transpose()?;
        Ok(Self { weight, bias, arithmetic: params.arithmetic })
    }

    /// Creates a layer without bias that shares `weight` with another layer.
    pub(crate) fn tied(params: &Params, weight: &Tensor) -> Self {
        Self { weight: weight.clone(), bias: None, arithmetic: params.arithmetic }
    }

    pub(crate) fn has_bias(&self) -> bool {
        self.bias.is_some()
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.arithmetic.linear(x, &self.weight, self.bias.as_ref())
    }
}

/// Layer norm over the last dim, epsilon 1e-5.
#[derive(Clone, Debug)]
pub(crate) struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    arithmetic: Arithmetic,
}

impl LayerNorm {
    pub(crate) fn new(params: &mut Params, path: &str, dim: usize) -> Result<Self> {
        let weight = params.ones(format!("{path}.weight"), dim)?;
        let bias = params.zeros(format!("{path}.bias"), dim)?;
        Ok(Self { weight, bias, arithmetic: params.arithmetic })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        self.arithmetic.layer_norm(x, &self.weight, &self.bias, 1e-5)
    }
}
