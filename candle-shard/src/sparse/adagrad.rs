//! Adagrad by rows.
use super::RowVar;
use super::slots::{Slots, check, next};
use crate::Result;
use crate::kernels::AdagradRule;
use candle_core::{Device, Var};

/// The parameters of [`Adagrad`]. There is no weight decay, which PyTorch also refuses for sparse gradients.
#[derive(Debug, Clone)]
pub struct ParamsAdagrad {
    /// The learning rate.
    pub lr: f64,
    /// The decay of the learning rate: step `t` has `lr / (1 + (t - 1) · lr_decay)`.
    pub lr_decay: f64,
    /// The initial value of the sums of squared gradients.
    pub initial_accumulator_value: f64,
    /// Added to their square root.
    pub eps: f64,
}

impl Default for ParamsAdagrad {
    fn default() -> Self {
        Self { lr: 1e-2, lr_decay: 0.0, initial_accumulator_value: 0.0, eps: 1e-10 }
    }
}

/// Adagrad (Duchi et al., 2011); its results equal those with a dense gradient.
///
/// The sums of squared gradients of 16-bit tables are f32.
#[derive(Debug)]
pub struct Adagrad {
    slots: Slots,
    steps: Var,
    params: ParamsAdagrad,
}

impl Adagrad {
    /// Creates an optimizer for `vars`.
    ///
    /// # Errors
    /// If a parameter is negative or not finite.
    pub fn new(vars: Vec<RowVar>, params: ParamsAdagrad) -> Result<Self> {
        let ParamsAdagrad { lr, lr_decay, initial_accumulator_value: start, eps } = params;
        for (name, value) in [("lr", lr), ("lr_decay", lr_decay), ("initial_accumulator_value", start), ("eps", eps)] {
            check("Adagrad", name, value, f64::INFINITY)?;
        }
        Ok(Self { slots: Slots::new(vars, 1, start)?, steps: Var::new(0u32, &Device::Cpu)?, params })
    }

    /// Returns the learning rate of the first step.
    pub fn learning_rate(&self) -> f64 {
        self.params.lr
    }

    /// Sets the learning rate of later steps, which `lr_decay` lowers as before.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn set_learning_rate(&mut self, lr: f64) -> Result<()> {
        check("Adagrad", "lr", lr, f64::INFINITY)?;
        self.params.lr = lr;
        Ok(())
    }

    /// Takes the gradients of all variables and updates the rows that have one.
    pub fn step(&mut self) -> Result<()> {
        let before = next(&self.steps)? - 1;
        let ParamsAdagrad { lr, lr_decay, eps, .. } = self.params;
        self.slots.step(&AdagradRule { lr: lr / (1.0 + f64::from(before) * lr_decay), eps })
    }

    /// Returns the variables of the state, by name. Read them to save the state, `set` them to load it.
    ///
    /// The names are `adagrad.sum.i` for variable `i`, and `adagrad.steps`.
    pub fn state(&self) -> Vec<(String, Var)> {
        let steps = ("adagrad.steps".to_string(), self.steps.clone());
        self.slots.named(&["adagrad.sum"]).chain([steps]).collect()
    }
}
