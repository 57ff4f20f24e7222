//! The toy models on a mesh, with the same structure, parameter names and results as the reference models.
mod attention;
mod mlp;
mod pipe;
mod transformer;

pub use mlp::{MlpModule, MlpStacked};
pub use pipe::TransformerPipe;
pub use transformer::Transformer;
