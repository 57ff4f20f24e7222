//! Layers whose weights stay quantized.
mod blocks;
mod embedding;
mod format;
mod linear;
mod qkv;
mod weight;

pub use embedding::QuantizedEmbedding;
pub(super) use format::WeightFormat;
pub use linear::QuantizedLinear;
pub use qkv::QuantizedQkv;
