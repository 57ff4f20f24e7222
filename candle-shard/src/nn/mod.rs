//! Layers built under a plan. Each rank creates and holds only its shard.
//!
#![doc = include_str!("README.md")]

mod adapter;
mod batch_norm;
mod constructors;
mod conv;
mod dropout;
mod dynamic_tanh;
mod embedding;
mod fully_shard;
mod fused_qkv;
mod group_norm;
mod init;
mod kv_cache;
mod latent;
mod linear;
mod lora;
mod mode;
mod module;
mod moe;
mod moved;
mod norm;
pub(crate) mod optim;
mod parameters;
mod place;
mod prelu;
mod quantized;
mod recompute;
mod rnn;
mod sequence_cache;
mod sequential;
mod source;
mod var_builder;

pub use crate::autograd::backward;
pub use crate::layout::Width;
pub use crate::random::Draws;
pub use adapter::{Adapter, LoraOptions};
pub use batch_norm::{BatchNorm, batch_norm};
pub use constructors::{embedding, layer_norm, linear, linear_no_bias, rms_norm};
pub use conv::{
    Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, conv_transpose1d, conv_transpose1d_no_bias,
    conv_transpose2d, conv_transpose2d_no_bias, conv1d, conv1d_no_bias, conv2d, conv2d_no_bias,
};
pub use dropout::Dropout;
pub use dynamic_tanh::DynamicTanh;
pub use embedding::{Embedding, EmbeddingBag};
pub use fused_qkv::{FusedQkv, Heads};
pub use group_norm::{GroupNorm, group_norm};
pub use kv_cache::{KvCache, LatentCache, RotatingKvCache, TextCache, TextTokens};
pub use latent::{LatentHeads, LatentProjection};
pub use linear::Linear;
pub use lora::{ActiveAdapters, AdapterWeight, RowAdapters};
pub use mode::Mode;
pub use module::{Module, ModuleT};
pub use moe::{ExpertGate, ExpertGroups, Load, MoE, MoEConfig, MoEOutput, Scores};
pub use norm::{LayerNorm, RmsNorm, layer_norm_no_bias};
pub use optim::{
    Adagrad, AdamW, AdjustLr, ElementOptimizer, LrSchedule, Muon, Optimizer, ParamGroup, ParamsAdagrad,
    ParamsMuon, ParamsSgd, Sgd,
};
pub use parameters::{Parameter, Parameters};
pub use prelu::{PReLU, prelu};
pub use quantized::{QuantizedEmbedding, QuantizedLinear, QuantizedQkv};
pub use recompute::recompute;
pub use rnn::{GRU, GRUState, LSTM, LSTMState, RNN, gru, lstm};
pub use sequence_cache::SequenceCache;
pub use sequential::{Sequential, seq};
pub use source::Init;
pub use var_builder::MeshVarBuilder;
#[allow(deprecated)]
pub use var_builder::ShardedVarBuilder;
