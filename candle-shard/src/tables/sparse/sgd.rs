//! Gradient descent by rows.
use super::RowVar;
use super::slots::{Options, Slots};
use crate::kernels::SgdRule;
use crate::nn::ParamsSgd;
use crate::{Error, Result};
use candle_core::Var;

/// Stochastic gradient descent: `w - lr · grad`; its results equal those with a dense gradient.
#[derive(Debug)]
pub struct Sgd {
    slots: Slots,
    options: Options<ParamsSgd>,
}

impl Sgd {
    /// Creates an optimizer for `vars`.
    ///
    /// # Errors
    /// If the learning rate is negative or not finite, or if there is weight decay or momentum, which change every row.
    pub fn new(vars: Vec<RowVar>, params: ParamsSgd) -> Result<Self> {
        let options = Options::new(params, |params| {
            let wrong = [("weight_decay", params.weight_decay), ("momentum", params.momentum)];
            let Some((name, value)) = wrong.into_iter().find(|(_, value)| *value != 0.0) else { return Ok(()) };
            Error::op("Sgd", format!("{name} is {value}, which changes rows without a gradient: expected 0"))
        })?;
        Ok(Self { slots: Slots::new(vars, 0, 0.0)?, options })
    }

    /// Returns the learning rate.
    ///
    /// # Errors
    /// If the [`state`](Self::state) was set to invalid options.
    pub fn learning_rate(&self) -> Result<f64> {
        Ok(self.options.get()?.lr)
    }

    /// Sets the learning rate of later steps.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn set_learning_rate(&mut self, lr: f64) -> Result<()> {
        self.options.set_lr(lr)
    }

    /// Takes the gradients of all variables and updates the rows that have one.
    pub fn step(&mut self) -> Result<()> {
        self.slots.step(&SgdRule { lr: self.options.get()?.lr, weight_decay: 0.0 })
    }

    /// Returns the variables of the state, by name: `sgd.options` for the fields of [`ParamsSgd`] in their order, on the host.
    /// Read it to save the state, `set` it to load it.
    pub fn state(&self) -> Vec<(String, Var)> {
        vec![self.options.named()]
    }
}
