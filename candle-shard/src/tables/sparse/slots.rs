//! Code that the optimizers share.
use super::RowVar;
use crate::Result;
use crate::kernels::Update;
use crate::nn::optim::{Params, check};
use candle_core::scalar::Scalar;
use candle_core::{DType, Device, Tensor, Var};

/// Variables, each with its state tensors of the same shape.
#[derive(Debug)]
pub(super) struct Slots(Vec<(RowVar, Vec<Var>)>);

impl Slots {
    /// Creates `count` state tensors per variable, filled with `start`.
    pub(super) fn new(vars: Vec<RowVar>, count: usize, start: f64) -> Result<Self> {
        let slot = |var: RowVar| {
            let states = (0..count).map(|_| state_of(var.var(), start)).collect::<Result<_>>();
            Ok((var, states?))
        };
        Ok(Self(vars.into_iter().map(slot).collect::<Result<_>>()?))
    }

    /// Takes the gradients and updates the rows that have one.
    pub(super) fn step<const N: usize>(&self, rule: &impl Update<N>) -> Result<()> {
        for (var, states) in &self.0 {
            if let Some(part) = var.take_part()? {
                rule.update_rows(var.var(), states, &part.rows, &part.grad)?;
            }
        }
        Ok(())
    }

    /// Returns the state as `name.index`, variable by variable.
    pub(super) fn named(&self, names: &[&str]) -> impl Iterator<Item = (String, Var)> {
        let of = |(i, (_, states)): (usize, &(RowVar, Vec<Var>))| {
            let named = |(name, state): (&&str, &Var)| (format!("{name}.{i}"), state.clone());
            names.iter().zip(states).map(named).collect::<Vec<_>>()
        };
        self.0.iter().enumerate().flat_map(of)
    }
}

/// The options of an optimizer, as a variable of its state.
#[derive(Debug)]
pub(super) struct Options<P> {
    numbers: Var,
    params: P,
    check: fn(&P) -> Result<()>,
}

impl<P: Params> Options<P> {
    /// Creates options for which `check` is satisfied, now and when others are loaded.
    pub(super) fn new(params: P, check: fn(&P) -> Result<()>) -> Result<Self> {
        params.check()?;
        check(&params)?;
        let numbers = Var::from_tensor(&Tensor::from_vec(params.options(), P::OPTIONS.len(), &Device::Cpu)?)?;
        Ok(Self { numbers, params, check })
    }

    /// Returns the options of now.
    pub(super) fn get(&self) -> Result<P> {
        let params = self.params.with_options(&self.numbers.to_vec1::<f64>()?)?;
        params.check()?;
        (self.check)(&params)?;
        Ok(params)
    }

    pub(super) fn set_lr(&self, lr: f64) -> Result<()> {
        check(P::TYPE, "lr", lr, f64::INFINITY)?;
        let mut params = self.get()?;
        *params.lr_mut() = lr;
        Ok(self.numbers.set(&Tensor::from_vec(params.options(), P::OPTIONS.len(), &Device::Cpu)?)?)
    }

    pub(super) fn named(&self) -> (String, Var) {
        (format!("{}.options", P::PREFIX), self.numbers.clone())
    }
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

/// Increments the step count and returns it.
pub(super) fn next(steps: &Var) -> Result<u32> {
    let next = steps.to_scalar::<u32>()?.saturating_add(1);
    steps.set(&Tensor::new(next, &Device::Cpu)?)?;
    Ok(next)
}
