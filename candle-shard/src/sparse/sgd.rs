//! Gradient descent by rows.
use super::RowVar;
use super::slots::{Slots, check};
use crate::Result;
use crate::kernels::SgdRule;

/// The parameters of [`Sgd`]. There is no weight decay, which would change every row.
#[derive(Debug, Clone)]
pub struct ParamsSgd {
    /// The learning rate.
    pub lr: f64,
}

impl Default for ParamsSgd {
    fn default() -> Self {
        Self { lr: 1e-3 }
    }
}

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
    /// If the learning rate is negative or not finite.
    pub fn new(vars: Vec<RowVar>, params: ParamsSgd) -> Result<Self> {
        check("Sgd", "lr", params.lr, f64::INFINITY)?;
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
        self.slots.step(&SgdRule { lr: self.params.lr })
    }
}
