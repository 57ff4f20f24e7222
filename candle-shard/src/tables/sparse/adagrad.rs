//! Adagrad by rows.
use super::RowVar;
use super::slots::{Options, Slots, next};
use crate::kernels::AdagradRule;
use crate::nn::ParamsAdagrad;
use crate::{Error, Result};
use candle_core::{Device, Var};

/// Adagrad (Duchi et al., 2011); its results equal those with a dense gradient.
///
/// The sums of squared gradients of 16-bit tables are f32.
#[derive(Debug)]
pub struct Adagrad {
    slots: Slots,
    steps: Var,
    options: Options<ParamsAdagrad>,
}

impl Adagrad {
    /// Creates an optimizer for `vars`.
    ///
    /// # Errors
    /// If a parameter is negative or not finite, or if there is weight decay, which PyTorch also refuses for sparse
    /// gradients.
    pub fn new(vars: Vec<RowVar>, params: ParamsAdagrad) -> Result<Self> {
        let start = params.initial_accumulator_value;
        let options = Options::new(params, |params| {
            let decay = params.weight_decay;
            if decay == 0.0 {
                return Ok(());
            }
            let reason = format!("weight_decay is {decay}, which changes rows without a gradient: expected 0");
            Error::op("Adagrad", reason)
        })?;
        Ok(Self { slots: Slots::new(vars, 1, start)?, steps: Var::new(0u32, &Device::Cpu)?, options })
    }

    /// Returns the learning rate of the first step.
    ///
    /// # Errors
    /// If the [`state`](Self::state) was set to invalid options.
    pub fn learning_rate(&self) -> Result<f64> {
        Ok(self.options.get()?.lr)
    }

    /// Sets the learning rate of later steps, which `lr_decay` lowers as before.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn set_learning_rate(&mut self, lr: f64) -> Result<()> {
        self.options.set_lr(lr)
    }

    /// Takes the gradients of all variables and updates the rows that have one.
    pub fn step(&mut self) -> Result<()> {
        let params = self.options.get()?;
        let lr = params.lr_at(next(&self.steps)?);
        self.slots.step(&AdagradRule { lr, weight_decay: 0.0, eps: params.eps })
    }

    /// Returns the variables of the state, by name. Read them to save the state, `set` them to load it.
    ///
    /// Those of a table are on its device, and the number of steps is on the host. `var.set(&saved.to_device(var.device())?)`
    /// loads each of them.
    ///
    /// The names are `adagrad.sum.i` for variable `i`, `adagrad.steps`, and `adagrad.options` for the fields of [`ParamsAdagrad`]
    /// in their order.
    pub fn state(&self) -> Vec<(String, Var)> {
        let steps = ("adagrad.steps".to_string(), self.steps.clone());
        self.slots.named(&["adagrad.sum"]).chain([steps, self.options.named()]).collect()
    }
}
