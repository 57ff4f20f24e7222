//! The options of optimizers.
use crate::{Error, Result};
use candle_core::DType;
use candle_dist::sum_dtype;
use std::fmt;

/// The options of one optimizer, which are those of each of its groups.
pub trait Params: Clone + fmt::Debug {
    /// The type that errors name.
    const TYPE: &'static str;
    /// What the names of its state begin with.
    const PREFIX: &'static str;

    /// Refuses options that mean nothing.
    fn check(&self) -> Result<()>;

    /// The learning rate.
    fn lr(&self) -> f64;

    /// The place of the learning rate.
    fn lr_mut(&mut self) -> &mut f64;

    /// The names of the tensors that are kept for each parameter.
    fn states(&self) -> &'static [&'static str];

    /// What their elements begin with.
    fn start(&self) -> f64 {
        0.0
    }

    /// Their dtype for a parameter, or master weight, of this one.
    fn state_dtype(of: DType) -> DType {
        sum_dtype(of)
    }

    /// Whether steps are part of the state.
    fn counts_steps(&self) -> bool;
}

/// Refuses an option of `op` that is not within `0..end`.
pub(crate) fn check(op: &'static str, name: &str, value: f64, end: f64) -> Result<()> {
    if (0.0..end).contains(&value) {
        return Ok(());
    }
    Error::op(op, format!("{name} is {value}: want a number from 0 to below {end}"))
}
