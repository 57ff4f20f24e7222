//! Layers built under a plan, so that a rank makes and holds only its shard.
mod adam_w;
mod checkpoint;
mod draws;
mod dropout;
mod embedding;
pub(crate) mod found;
mod fused_qkv;
mod linear;
mod norm;
mod parameters;
pub(crate) mod part;
pub(crate) mod shared;
mod var_builder;
mod width;

pub use adam_w::AdamW;
pub use checkpoint::checkpoint;
pub use draws::Draws;
pub use dropout::{Dropout, Mode};
pub use embedding::{Embedding, EmbeddingBag};
pub use found::backward;
pub use fused_qkv::{FusedQkv, Heads};
pub use linear::Linear;
pub use norm::{LayerNorm, RmsNorm};
pub use parameters::{Parameter, Parameters};
pub use var_builder::{Init, ShardedVarBuilder};
pub use width::Width;
