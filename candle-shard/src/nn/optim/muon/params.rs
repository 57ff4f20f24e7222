//! The options of Muon.
use super::super::params::{Params, check, unknown};
use crate::{Error, Result};
use candle_core::DType;

/// How the learning rate depends on the shape `[rows, columns]` of a matrix: PyTorch's `adjust_lr_fn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum AdjustLr {
    /// `lr · √max(1, rows / columns)`.
    #[default]
    Original,
    /// `lr · 0.2 · √max(rows, columns)`, to reuse the learning rate and weight decay of an AdamW.
    MatchRmsAdamW,
    /// `lr · √(rows / columns)`.
    SpectralUnclamped,
}

impl AdjustLr {
    /// In the order of their numbers in checkpoints.
    const ALL: [Self; 3] = [Self::Original, Self::MatchRmsAdamW, Self::SpectralUnclamped];
}

/// The options of [`Muon`](super::Muon), with PyTorch's names and defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamsMuon {
    /// The learning rate.
    pub lr: f64,
    /// The weight decay: each step subtracts this times the unadjusted learning rate of the parameter.
    pub weight_decay: f64,
    /// The weight of the old buffer in the running mean of the gradients.
    pub momentum: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
    /// The coefficients of the polynomial `a·X + b·XXᵀX + c·(XXᵀ)²X` of an iteration.
    pub ns_coefficients: [f64; 3],
    /// The lower bound of the norm by which a matrix is divided.
    pub eps: f64,
    /// The number of iterations, below 100.
    pub ns_steps: usize,
    /// How the learning rate depends on the shape.
    pub adjust_lr: AdjustLr,
    /// The dtype of the iterations and of the exchange: `BF16` as in PyTorch, `F32` or `F64`.
    ///
    /// CPUs compute bf16 in f32 and round each result, so `F32` is faster there, and more accurate. It is no part of the state.
    pub dtype: DType,
}

impl Default for ParamsMuon {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            weight_decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            ns_coefficients: [3.4445, -4.7750, 2.0315],
            eps: 1e-7,
            ns_steps: 5,
            adjust_lr: AdjustLr::Original,
            dtype: DType::BF16,
        }
    }
}

impl ParamsMuon {
    /// Returns the learning rate of a matrix of this shape.
    pub(super) fn adjusted_lr(&self, dims: &[usize]) -> f64 {
        let (rows, columns) = (dims[0] as f64, dims[1] as f64);
        let ratio = match self.adjust_lr {
            AdjustLr::Original => (rows / columns).max(1.0).sqrt(),
            AdjustLr::MatchRmsAdamW => 0.2 * rows.max(columns).sqrt(),
            AdjustLr::SpectralUnclamped => (rows / columns).sqrt(),
        };
        self.lr * ratio
    }
}

impl Params for ParamsMuon {
    const TYPE: &'static str = "Muon";
    const PREFIX: &'static str = "muon";
    const OPTIONS: &'static [&'static str] =
        &["lr", "weight_decay", "momentum", "nesterov", "a", "b", "c", "eps", "ns_steps", "adjust_lr"];

    fn check(&self) -> Result<()> {
        let Self { lr, weight_decay, momentum, eps, ns_coefficients, ns_steps, dtype, .. } = *self;
        for (name, value) in
            [("lr", lr), ("weight_decay", weight_decay), ("momentum", momentum), ("eps", eps)]
        {
            check(Self::TYPE, name, value, f64::INFINITY)?;
        }
        if !ns_coefficients.iter().all(|c| c.is_finite()) || ns_steps >= 100 {
            let got = format!("ns_coefficients {ns_coefficients:?} and {ns_steps} ns_steps");
            return Error::op(Self::TYPE, format!("{got}: expected finite numbers and fewer than 100 steps"));
        }
        if !matches!(dtype, DType::BF16 | DType::F32 | DType::F64) {
            return Error::op(
                Self::TYPE,
                format!("the dtype is {}: expected bf16, f32 or f64", dtype.as_str()),
            );
        }
        Ok(())
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn lr_mut(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn options(&self) -> Vec<f64> {
        let Self {
            lr,
            weight_decay,
            momentum,
            nesterov,
            ns_coefficients: [a, b, c],
            eps,
            ns_steps,
            adjust_lr,
            ..
        } = *self;
        let adjust_lr = AdjustLr::ALL.into_iter().position(|of| of == adjust_lr).unwrap_or_default();
        let nesterov = f64::from(nesterov);
        vec![lr, weight_decay, momentum, nesterov, a, b, c, eps, ns_steps as f64, adjust_lr as f64]
    }

    fn with_options(&self, options: &[f64]) -> Result<Self> {
        let [lr, weight_decay, momentum, nesterov, a, b, c, eps, ns_steps, adjust_lr] = *options else {
            return unknown(options);
        };
        let Some(&adjust_lr) = AdjustLr::ALL.get(adjust_lr as usize) else { return unknown(options) };
        let (nesterov, ns_coefficients, ns_steps) = (nesterov != 0.0, [a, b, c], ns_steps as usize);
        let dtype = self.dtype;
        let made =
            Self { lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr, dtype };
        // A number that stands for nothing is not that of what it was taken for.
        let is_same = made.options().iter().zip(options).all(|(made, option)| made == option);
        if is_same { Ok(made) } else { unknown(options) }
    }

    fn states(&self) -> &'static [&'static str] {
        &["momentum_buffer"]
    }

    fn counts_steps(&self) -> bool {
        false
    }
}
