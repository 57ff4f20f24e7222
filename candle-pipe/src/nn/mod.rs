//! Layers for stages: their weight gradients can be deferred, and their random numbers depend on rows of the batch.
mod deferred;
mod dropout;
mod linear;
mod sequential;

pub use deferred::DeferredGradients;
pub use dropout::Dropout;
pub use linear::{Linear, deferred_linear, linear, linear_no_bias};
pub use sequential::{Sequential, seq};
