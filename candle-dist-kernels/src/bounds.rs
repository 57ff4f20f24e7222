//! Bounds of elements, by candle's operations.
//!
//! These are generic in candle: each crate that calls them would compile their loops for all dtypes again.
use candle_core::{Result, Tensor};

/// Returns each element, at least `min`.
pub fn at_least(x: &Tensor, min: f64) -> Result<Tensor> {
    x.maximum(min)
}

/// Clamps each element to `min..=max`.
pub fn clamp(x: &Tensor, min: f64, max: f64) -> Result<Tensor> {
    x.clamp(min, max)
}
