//! Optimizers that update only the rows that have a gradient.
use super::RowVar;
use crate::kernels::{AdagradRule, AdamWRule, SgdRule, Update};
use crate::nn::optim::{Params, check};
use crate::nn::{ParamsAdagrad, ParamsSgd};
use crate::{Error, Result};
use candle_core::scalar::Scalar;
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::ParamsAdamW;

/// Stochastic gradient descent: `w - lr · grad`; its results equal those with a dense gradient.
///
/// It refuses weight decay and momentum, which change every row. State: `sgd.options`.
pub type SparseSgd = RowOptimizer<ParamsSgd>;

/// The former name of [`SparseSgd`].
#[deprecated(since = "0.1.0", note = "renamed to SparseSgd")]
pub type Sgd = SparseSgd;

/// Adagrad (Duchi et al., 2011); its results equal those with a dense gradient.
///
/// It refuses weight decay, as PyTorch does for sparse gradients. State: `adagrad.sum.i` for variable `i`, `adagrad.steps` and
/// `adagrad.options`. The sums of squared gradients of 16-bit tables are f32.
pub type SparseAdagrad = RowOptimizer<ParamsAdagrad>;

/// The former name of [`SparseAdagrad`].
#[deprecated(since = "0.1.0", note = "renamed to SparseAdagrad")]
pub type Adagrad = SparseAdagrad;

/// Lazy AdamW: [`kernels::AdamW`](crate::kernels::AdamW) on the rows that have a gradient; other rows stay as they are.
///
/// A row without a gradient neither moves nor decays, and its moments stay, as in PyTorch's `SparseAdam`; the bias
/// correction counts all steps. If every row has a gradient in each step, this is the dense AdamW. State:
/// `adam_w.first_moment.i` and `adam_w.second_moment.i` for variable `i`, `adam_w.steps` and `adam_w.options`. The moments
/// of 16-bit tables are f32.
pub type SparseAdamW = RowOptimizer<ParamsAdamW>;

/// The former name of [`SparseAdamW`].
#[deprecated(since = "0.1.0", note = "renamed to SparseAdamW")]
pub type AdamW = SparseAdamW;

/// Options of an optimizer by rows.
pub trait RowParams: Params {
    /// Returns the options that change rows without a gradient unless they are 0.
    fn of_all_rows(&self) -> Vec<(&'static str, f64)> {
        Vec::new()
    }

    /// Updates `rows` of a table, which may repeat, by their gradients; `steps` counts this step.
    fn step(&self, steps: u32, table: (&Var, &[Var]), rows: &[u32], grad: &Tensor)
    -> candle_core::Result<()>;
}

/// An optimizer of tables that updates the rows that have a gradient: [`SparseSgd`], [`SparseAdagrad`] or [`SparseAdamW`].
#[derive(Debug)]
pub struct RowOptimizer<P> {
    /// The tables, each with its state tensors of the same shape.
    tables: Vec<(RowVar, Vec<Var>)>,
    steps: Var,
    /// The options of now, which a load may change.
    options: Var,
    params: P,
}

impl<P: RowParams> RowOptimizer<P> {
    /// Creates an optimizer for `vars`.
    ///
    /// # Errors
    /// If an option is out of range, or changes rows without a gradient.
    pub fn new(vars: Vec<RowVar>, params: P) -> Result<Self> {
        checked(&params)?;
        let mut tables = Vec::with_capacity(vars.len());
        for var in vars {
            let states = params.states().iter().map(|_| state_of(var.var(), params.start()));
            let states = states.collect::<Result<_>>()?;
            tables.push((var, states));
        }
        let options = Var::from_tensor(&numbers(&params)?)?;
        Ok(Self { tables, steps: Var::new(0u32, &Device::Cpu)?, options, params })
    }

    /// Returns the learning rate; that of Adagrad is the rate of the first step, which `lr_decay` lowers.
    ///
    /// # Errors
    /// If the [`state`](Self::state) was set to invalid options.
    pub fn learning_rate(&self) -> Result<f64> {
        Ok(self.params()?.lr())
    }

    /// Sets the learning rate of later steps.
    ///
    /// # Errors
    /// Those of [`new`](Self::new).
    pub fn set_learning_rate(&mut self, lr: f64) -> Result<()> {
        check(P::TYPE, "lr", lr, f64::INFINITY)?;
        let mut params = self.params()?;
        *params.lr_mut() = lr;
        Ok(self.options.set(&numbers(&params)?)?)
    }

    /// Takes the gradients of all variables and updates the rows that have one.
    ///
    /// # Errors
    /// If the [`state`](Self::state) was set to invalid options.
    pub fn step(&mut self) -> Result<()> {
        let params = self.params()?;
        let steps = self.steps.to_scalar::<u32>()?.saturating_add(1);
        self.steps.set(&Tensor::new(steps, &Device::Cpu)?)?;
        for (var, states) in &self.tables {
            if let Some(part) = var.take_part()? {
                params.step(steps, (var.var(), states), &part.rows, &part.grad)?;
            }
        }
        Ok(())
    }

    /// Returns the variables of the state, by name. Read them to save the state, `set` them to load it.
    ///
    /// Those of a table are on its device. The number of steps is on the host, and so are the options, the numbers of the fields in
    /// their order. `var.set(&saved.to_device(var.device())?)` loads each variable.
    pub fn state(&self) -> Vec<(String, Var)> {
        let of_table = |(i, (_, states)): (usize, &(RowVar, Vec<Var>))| {
            let named = self.params.states().iter().zip(states);
            named
                .map(|(name, state)| (format!("{}.{name}.{i}", P::PREFIX), state.clone()))
                .collect::<Vec<_>>()
        };
        let steps = self.params.counts_steps().then(|| (format!("{}.steps", P::PREFIX), self.steps.clone()));
        let options = (format!("{}.options", P::PREFIX), self.options.clone());
        self.tables.iter().enumerate().flat_map(of_table).chain(steps).chain([options]).collect()
    }

    /// Returns the options of now.
    fn params(&self) -> Result<P> {
        let params = self.params.with_options(&self.options.to_vec1::<f64>()?)?;
        checked(&params)?;
        Ok(params)
    }
}

impl RowParams for ParamsSgd {
    fn of_all_rows(&self) -> Vec<(&'static str, f64)> {
        vec![("weight_decay", self.weight_decay), ("momentum", self.momentum)]
    }

    fn step(
        &self,
        _: u32,
        (table, states): (&Var, &[Var]),
        rows: &[u32],
        grad: &Tensor,
    ) -> candle_core::Result<()> {
        SgdRule { lr: self.lr, weight_decay: 0.0 }.update_rows(table, states, rows, grad)
    }
}

impl RowParams for ParamsAdagrad {
    fn of_all_rows(&self) -> Vec<(&'static str, f64)> {
        vec![("weight_decay", self.weight_decay)]
    }

    fn step(
        &self,
        steps: u32,
        (table, states): (&Var, &[Var]),
        rows: &[u32],
        grad: &Tensor,
    ) -> candle_core::Result<()> {
        AdagradRule { lr: self.lr_at(steps), weight_decay: 0.0, eps: self.eps }
            .update_rows(table, states, rows, grad)
    }
}

impl RowParams for ParamsAdamW {
    fn step(
        &self,
        steps: u32,
        (table, states): (&Var, &[Var]),
        rows: &[u32],
        grad: &Tensor,
    ) -> candle_core::Result<()> {
        let Self { lr, beta1, beta2, eps, weight_decay } = *self;
        let betas = [beta1, beta2];
        let scales = betas.map(|beta| 1.0 / (1.0 - beta.powi(steps as i32)));
        AdamWRule { lr, betas, scales, eps, keep: 1.0 - lr * weight_decay }
            .update_rows(table, states, rows, grad)
    }
}

/// Refuses options that are out of range, or that change rows without a gradient.
fn checked<P: RowParams>(params: &P) -> Result<()> {
    params.check()?;
    let Some((name, value)) = params.of_all_rows().into_iter().find(|(_, value)| *value != 0.0) else {
        return Ok(());
    };
    Error::op(P::TYPE, format!("{name} is {value}, which changes rows without a gradient: expected 0"))
}

/// Returns the options as a tensor.
fn numbers<P: RowParams>(params: &P) -> Result<Tensor> {
    Ok(Tensor::from_vec(params.options(), P::OPTIONS.len(), &Device::Cpu)?)
}

/// Creates a state tensor of the variable's shape, f32 for 16-bit floats.
fn state_of(var: &Var, start: f64) -> Result<Var> {
    let (len, shape, device) = (var.elem_count(), var.shape(), var.device());
    let (dtype, value) = match var.dtype() {
        DType::F64 => (DType::F64, Scalar::F64(start)),
        _ => (DType::F32, Scalar::F32(start as f32)),
    };
    if !device.is_cpu() {
        // Filled in place, because tables may be as large as half of a GPU.
        let state = Var::zeros(shape, dtype, device)?;
        if start != 0.0 && len > 0 {
            state.const_set(value)?;
        }
        return Ok(state);
    }
    // Writes every element: zeroed pages that the system maps only on first access would slow down the first steps.
    let state = match value {
        Scalar::F64(value) => Tensor::from_iter(std::iter::repeat_n(value, len), device)?,
        _ => Tensor::from_iter(std::iter::repeat_n(start as f32, len), device)?,
    };
    Ok(Var::from_tensor(&state.reshape(shape)?)?)
}
