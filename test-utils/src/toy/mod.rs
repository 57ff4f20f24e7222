//! The toy models on a mesh, with the same structure, parameter names and results as the reference models.
//!
#![doc = include_str!("README.md")]

mod attention;
mod mlp;
mod pipe;
mod placements;
mod transformer;

pub use mlp::{MlpModule, MlpStacked};
pub use pipe::TransformerPipe;
pub use placements::placements;
pub use transformer::{Transformer, TransformerOutput};
