//! The options of optimizers.
use crate::{Error, Result};
use candle_core::DType;
use candle_dist::sum_dtype;
use std::fmt;

/// The options of one optimizer; each of its groups has its own.
pub trait Params: Clone + fmt::Debug {
    /// The type name in errors.
    const TYPE: &'static str;
    /// The prefix of its state's names.
    const PREFIX: &'static str;
    /// The names of the options that a checkpoint has.
    const OPTIONS: &'static [&'static str];

    /// Refuses invalid options.
    fn check(&self) -> Result<()>;

    /// Returns the learning rate.
    fn lr(&self) -> f64;

    /// Returns the learning rate, to be changed.
    fn lr_mut(&mut self) -> &mut f64;

    /// Returns the values of [`OPTIONS`](Self::OPTIONS) as numbers.
    fn options(&self) -> Vec<f64>;

    /// Returns the same options with these numbers.
    ///
    /// # Errors
    /// If there are more or fewer of them, or one stands for nothing. Their ranges are those of [`check`](Self::check).
    fn with_options(&self, options: &[f64]) -> Result<Self>;

    /// Returns the names of the state tensors of each parameter.
    fn states(&self) -> &'static [&'static str];

    /// Returns the initial value of their elements.
    fn start(&self) -> f64 {
        0.0
    }

    /// Their dtype for a parameter, or master weight, of dtype `of`.
    fn state_dtype(of: DType) -> DType {
        sum_dtype(of)
    }

    /// Whether steps are part of the state.
    fn counts_steps(&self) -> bool;
}

/// Refuses an option of `op` outside of `0..end`.
pub(crate) fn check(op: &'static str, name: &str, value: f64, end: f64) -> Result<()> {
    if (0.0..end).contains(&value) {
        return Ok(());
    }
    Error::op(op, format!("{name} is {value}: expected a number from 0 to below {end}"))
}

/// Refuses the saved numbers `options` of an optimizer.
pub(crate) fn unknown<P: Params>(options: &[f64]) -> Result<P> {
    let names = P::OPTIONS;
    Error::op(
        P::TYPE,
        format!(
            "the saved options are {options:?}: expected values of {names:?}; was it saved by another version?"
        ),
    )
}
