//! Layers whose weights stay quantized.
mod blocks;
mod embedding;
mod linear;
mod qkv;
mod weight;

pub use embedding::QuantizedEmbedding;
pub use linear::QuantizedLinear;
pub use qkv::QuantizedQkv;
