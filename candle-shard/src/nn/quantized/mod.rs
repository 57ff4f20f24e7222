//! Layers whose weights stay quantized.
mod blocks;
mod embedding;
mod format;
mod linear;
mod qkv;
mod shared_bytes;
mod weight;

pub use embedding::QuantizedEmbedding;
pub(super) use format::WeightFormat;
pub use linear::QuantizedLinear;
pub use qkv::QuantizedQkv;
pub(super) use shared_bytes::SharedBytes;
