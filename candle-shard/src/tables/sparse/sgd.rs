//! Gradient descent by rows.
use super::RowVar;
use super::slots::Slots;
use crate::kernels::SgdRule;
use crate::nn::ParamsSgd;
use crate::nn::optim::{Params, check};
use crate::{Error, Result};

/// Stochastic gradient descent: `w - lr · grad`; its results equal those with a dense gradient.
#[derive(Debug)]
pub struct Sgd {
    slots: Slots,
    params: ParamsSgd,
}

impl Sgd {
    /// Creates an optimizer for `vars`.
    ///
    /// # Errors
    /// If the learning rate is negative or not finite, or if there is weight decay or momentum, which change every row.
    pub fn new(vars: Vec<RowVar>, params: ParamsSgd) -> Result<Self> {
        params.check()?;
        for (name, value) in [("weight_decay", params.weight_decay), ("momentum", params.momentum)] {
            if value != 0.0 {
                return Error::op(
                    "Sgd",
                    format!("{name} is {value}, which changes rows without a gradient: expected 0"),
                );
            }
        }
        Ok(Self { slots: Slots::new(vars, 0, 0.0)?, params })
    }

    /// Returns the learning rate.
    pub fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    /// Sets the learning rate of later steps.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn set_learning_rate(&mut self, lr: f64) -> Result<()> {
        check("Sgd", "lr", lr, f64::INFINITY)?;
        self.params.lr = lr;
        Ok(())
    }

    /// Takes the gradients of all variables and updates the rows that have one.
    pub fn step(&mut self) -> Result<()> {
        self.slots.step(&SgdRule { lr: self.params.lr, weight_decay: 0.0 })
    }
}
