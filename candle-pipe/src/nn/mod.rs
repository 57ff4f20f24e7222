//! Layers for stages: their weight gradients can be deferred, and their random numbers depend on rows of the batch.
mod dropout;
mod late;
mod linear;
mod sequential;

pub use dropout::Dropout;
pub use late::LateGradients;
pub use linear::{Linear, deferred_linear, linear, linear_no_bias};
pub use sequential::{Sequential, seq};
