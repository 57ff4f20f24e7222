//! The toy models on a mesh: the same structure, parameter names and numbers as the reference models.
mod attention;
mod mlp;
mod pipe;
mod transformer;

pub use mlp::{MlpModule, MlpStacked};
pub use pipe::TransformerPipe;
pub use transformer::Transformer;
