//! Adagrad.
use super::element::{ElementOptimizer, ElementParams};
use super::params::{Params, check, unknown};
use super::slot::Slot;
use crate::Result;
use crate::kernels::{AdagradRule, Update};
use candle_core::{Tensor, bail};

/// Adagrad (Duchi et al. 2011), by PyTorch's rule.
///
/// State: `adagrad.sum.NAME`, which is f32 for 16-bit parameters, `adagrad.step.NAME` and `adagrad.options.NAME`.
pub type Adagrad = ElementOptimizer<ParamsAdagrad>;

/// The options of [`Adagrad`] and of [`sparse::Adagrad`](crate::sparse::Adagrad), with PyTorch's names and defaults.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamsAdagrad {
    /// The learning rate.
    pub lr: f64,
    /// The decay of the learning rate: step `t` uses `lr / (1 + (t - 1) · lr_decay)`.
    pub lr_decay: f64,
    /// The factor by which the parameter is added to its gradient (an L2 penalty).
    pub weight_decay: f64,
    /// The initial value of the sums of squared gradients.
    pub initial_accumulator_value: f64,
    /// The number that is added to the root of these sums.
    pub eps: f64,
}

impl Default for ParamsAdagrad {
    fn default() -> Self {
        Self { lr: 1e-2, lr_decay: 0.0, weight_decay: 0.0, initial_accumulator_value: 0.0, eps: 1e-10 }
    }
}

impl ParamsAdagrad {
    /// Returns the learning rate of step `step`, which counts from 1.
    pub(crate) fn lr_at(&self, step: u32) -> f64 {
        self.lr / (1.0 + (f64::from(step) - 1.0) * self.lr_decay)
    }
}

impl Params for ParamsAdagrad {
    const TYPE: &'static str = "Adagrad";
    const PREFIX: &'static str = "adagrad";
    const OPTIONS: &'static [&'static str] =
        &["lr", "lr_decay", "weight_decay", "initial_accumulator_value", "eps"];

    fn check(&self) -> Result<()> {
        let Self { lr, lr_decay, weight_decay, initial_accumulator_value: start, eps } = *self;
        let decays = [("lr_decay", lr_decay), ("weight_decay", weight_decay)];
        let others = [("lr", lr), ("initial_accumulator_value", start), ("eps", eps)];
        others
            .into_iter()
            .chain(decays)
            .try_for_each(|(name, value)| check(Self::TYPE, name, value, f64::INFINITY))
    }

    fn lr(&self) -> f64 {
        self.lr
    }

    fn lr_mut(&mut self) -> &mut f64 {
        &mut self.lr
    }

    fn options(&self) -> Vec<f64> {
        let Self { lr, lr_decay, weight_decay, initial_accumulator_value, eps } = *self;
        vec![lr, lr_decay, weight_decay, initial_accumulator_value, eps]
    }

    fn with_options(&self, options: &[f64]) -> Result<Self> {
        let [lr, lr_decay, weight_decay, initial_accumulator_value, eps] = *options else {
            return unknown(options);
        };
        Ok(Self { lr, lr_decay, weight_decay, initial_accumulator_value, eps })
    }

    fn states(&self) -> &'static [&'static str] {
        &["sum"]
    }

    fn start(&self) -> f64 {
        self.initial_accumulator_value
    }

    fn counts_steps(&self) -> bool {
        true
    }
}

impl ElementParams for ParamsAdagrad {
    fn step(&self, slot: &Slot, grad: &Tensor) -> candle_core::Result<()> {
        let [sum] = &slot.states[..] else {
            bail!("Adagrad: {} has {} states", slot.of.name, slot.states.len())
        };
        let rule = AdagradRule { lr: self.lr_at(slot.steps), weight_decay: self.weight_decay, eps: self.eps };
        let var = (&slot.of.var, slot.master.as_ref());
        rule.update_all(Self::TYPE, var, [sum], grad)
    }
}
