//! Ops that kernels of this crate compute in one launch on CUDA devices, with the gradients.
//!
//! The formulas are those of the host. Sums of 16-bit floats are in f32, and their order does not depend on the run. With
//! `CANDLE_DIST_COMPOSED=1` the ops are composed of candle's operations there, as on other devices.
pub(crate) mod adam_w;
mod call;
pub(crate) mod candidates;
pub(crate) mod cross_entropy;
#[cfg(feature = "cuda")]
mod cuda;
pub(crate) mod dropout;
pub(crate) mod emulated;
pub(crate) mod function;
pub(crate) mod largest;
pub(crate) mod norm;
pub(crate) mod put;
pub(crate) mod rope;
mod run;
pub(crate) mod softmax;
pub(crate) mod strips;

pub use call::KernelText;
pub(crate) use run::{computes, would_compute};
