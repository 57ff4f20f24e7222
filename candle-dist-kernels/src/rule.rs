//! What an elementwise optimizer rule is.
use super::real::Real;
use candle_core::{Result, Tensor};

/// An update of numbers, each of which has `N` numbers of state.
pub(super) trait UpdateRule<const N: usize> {
    /// Returns the function that maps a number, its state and its gradient to the new number and state.
    fn of<T: Real>(&self) -> impl Fn(T, [T; N], T) -> (T, [T; N]);

    /// Returns the updated tensor and its states in the compute dtype, composed of candle's operations, for tensors on which
    /// no kernel runs.
    fn composed(&self, x: &Tensor, states: [&Tensor; N], grad: &Tensor) -> Result<(Tensor, [Tensor; N])>;
}
