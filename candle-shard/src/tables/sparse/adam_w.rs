//! AdamW by rows.
use super::RowVar;
use super::slots::{Options, Slots, next};
use crate::Result;
use crate::kernels::AdamWRule;
use candle_core::{Device, Var};
use candle_nn::ParamsAdamW;

/// Lazy AdamW: [`kernels::AdamW`](crate::kernels::AdamW) on the rows that have a gradient; other rows stay as they are.
///
/// A row without a gradient neither moves nor decays, and its moments stay, as in PyTorch's `SparseAdam`; the bias
/// correction counts all steps. If every row has a gradient in each step, this is the dense AdamW. The moments of
/// 16-bit tables are f32.
#[derive(Debug)]
pub struct AdamW {
    slots: Slots,
    steps: Var,
    options: Options<ParamsAdamW>,
}

impl AdamW {
    /// Creates an optimizer for `vars`.
    ///
    /// # Errors
    /// If a parameter is negative or not finite, or if a beta is not below 1.
    pub fn new(vars: Vec<RowVar>, params: ParamsAdamW) -> Result<Self> {
        let options = Options::new(params, |_| Ok(()))?;
        Ok(Self { slots: Slots::new(vars, 2, 0.0)?, steps: Var::new(0u32, &Device::Cpu)?, options })
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
        let ParamsAdamW { lr, beta1, beta2, eps, weight_decay } = self.options.get()?;
        let steps = next(&self.steps)?;
        let betas = [beta1, beta2];
        let scales = betas.map(|beta| 1.0 / (1.0 - beta.powi(steps as i32)));
        self.slots.step(&AdamWRule { lr, betas, scales, eps, keep: 1.0 - lr * weight_decay })
    }

    /// Returns the variables of the state, by name. Read them to save the state, `set` them to load it.
    ///
    /// Those of a table are on its device, and the number of steps is on the host. `var.set(&saved.to_device(var.device())?)`
    /// loads each of them.
    ///
    /// The names are `adam_w.first_moment.i` and `adam_w.second_moment.i` for variable `i`, `adam_w.steps`, and `adam_w.options`
    /// for the fields of [`ParamsAdamW`] in their order.
    pub fn state(&self) -> Vec<(String, Var)> {
        let steps = ("adam_w.steps".to_string(), self.steps.clone());
        self.slots
            .named(&["adam_w.first_moment", "adam_w.second_moment"])
            .chain([steps, self.options.named()])
            .collect()
    }
}
