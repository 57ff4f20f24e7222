//! Layers that know that they are in a stage: their weight gradients can wait, their random numbers follow the rows.
mod dropout;
mod late;
mod linear;
mod sequential;

pub use dropout::Dropout;
pub use late::LateGradients;
pub use linear::{Linear, deferred_linear, linear, linear_no_bias};
pub use sequential::{Sequential, seq};
