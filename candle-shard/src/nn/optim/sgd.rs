//! Stochastic gradient descent.
use super::element::{ElementOptimizer, ElementParams};
use super::params::{Params, check, unknown};
use super::slot::Slot;
use crate::kernels::{MomentumRule, SgdRule, Update};
use crate::{Error, Result};
use candle_core::Tensor;

/// Stochastic gradient descent with momentum (Sutskever et al. 2013), by PyTorch's rule.
///
/// State: `sgd.options.NAME`, and with momentum `sgd.momentum_buffer.NAME` and `sgd.step.NAME`. Buffers of 16-bit parameters
/// are f32.
pub type Sgd = ElementOptimizer<ParamsSgd>;

/// The options of [`Sgd`], with PyTorch's names and defaults.
///
/// [`sparse::Sgd`](crate::sparse::Sgd) has a learning rate only.
#[derive(Debug, Clone, PartialEq)]
pub struct ParamsSgd {
    /// The learning rate.
    pub lr: f64,
    /// The factor of the buffer, to which a step adds the gradient.
    pub momentum: f64,
    /// The share of the gradient that is not added to the buffer, from the second step on.
    pub dampening: f64,
    /// The factor by which the parameter is added to its gradient (an L2 penalty).
    pub weight_decay: f64,
    /// Whether to use Nesterov momentum.
    pub nesterov: bool,
}

impl Default for ParamsSgd {
    fn default() -> Self {
        Self { lr: 1e-3, momentum: 0.0, dampening: 0.0, weight_decay: 0.0, nesterov: false }
    }
}

impl Params for ParamsSgd {
    const TYPE: &'static str = "Sgd";
    const PREFIX: &'static str = "sgd";
    const OPTIONS: &'static [&'static str] = &["lr", "momentum", "dampening", "weight_decay", "nesterov"];

    fn check(&self) -> Result<()> {
        let Self { lr, momentum, dampening, weight_decay, nesterov } = *self;
        for (name, value) in [("lr", lr), ("momentum", momentum), ("weight_decay", weight_decay)] {
            check(Self::TYPE, name, value, f64::INFINITY)?;
        }
        if !dampening.is_finite() {
            return Error::op(Self::TYPE, format!("dampening is {dampening}: expected a finite number"));
        }
        if nesterov && (momentum == 0.0 || dampening != 0.0) {
            let got = format!("nesterov with momentum {momentum} and dampening {dampening}");
            return Error::op(Self::TYPE, format!("{got}: expected a momentum and no dampening"));
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
        let Self { lr, momentum, dampening, weight_decay, nesterov } = *self;
        vec![lr, momentum, dampening, weight_decay, f64::from(nesterov)]
    }

    fn with_options(&self, options: &[f64]) -> Result<Self> {
        let [lr, momentum, dampening, weight_decay, nesterov] = *options else { return unknown(options) };
        Ok(Self { lr, momentum, dampening, weight_decay, nesterov: nesterov != 0.0 })
    }

    fn states(&self) -> &'static [&'static str] {
        if self.momentum == 0.0 { &[] } else { &["momentum_buffer"] }
    }

    fn counts_steps(&self) -> bool {
        self.momentum != 0.0
    }
}

impl ElementParams for ParamsSgd {
    fn step(&self, slot: &Slot, grad: &Tensor) -> candle_core::Result<()> {
        let Self { lr, momentum, dampening, weight_decay, nesterov } = *self;
        let var = (&slot.of.var, slot.master.as_ref());
        match &slot.states[..] {
            [buffer] => {
                let part = if slot.steps == 1 { 1.0 } else { 1.0 - dampening };
                let rule = MomentumRule { lr, weight_decay, momentum, part, nesterov };
                rule.update_all(Self::TYPE, var, [buffer], grad)
            }
            _ => SgdRule { lr, weight_decay }.update_all(Self::TYPE, var, [], grad),
        }
    }
}
