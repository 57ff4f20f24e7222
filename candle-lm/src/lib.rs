#![doc = include_str!("../README.md")]

pub mod adapter;
mod agree;
mod attention;
mod balance;
pub mod batch;
mod between;
pub mod cache;
pub mod chat;
pub mod config;
pub mod cut;
pub mod declare;
mod delta_net;
pub mod dtype;
pub mod engine;
mod error;
mod expert_files;
mod feed_forward;
pub mod files;
pub mod generate;
mod gguf;
pub mod hub;
mod latent;
mod layer;
mod layer_embeddings;
mod lm;
mod mamba;
pub mod memory;
mod mlx;
pub mod model;
mod norm;
mod pass;
mod projection;
pub mod random_model;
mod rope;
pub mod sample;
mod scheduler;
pub mod score;
pub mod sentence_embedding;
pub mod serve;
pub mod session;
mod short_conv;
mod special_tokens;
mod staged;
pub mod step;
pub mod stops;
pub mod tokens;
pub mod train;
mod writing;

pub use agree::agreed;
pub use chat::ChatMessage;
#[allow(deprecated)]
pub use chat::Message;
pub use error::{Error, InputError, Result};
pub use generate::Stop;
pub use lm::{Generation, Lm, LmOptions, Pieces, Score};
pub use model::Decoder;
pub use sample::Sampling;

/// The mesh axis over which layers are cut, experts too.
pub const LAYER_AXIS: &str = "tp";

/// The mesh axis over which the tokens of a text are distributed.
pub const TOKEN_AXIS: &str = "cp";

/// The mesh axis over which experts are distributed.
pub const EXPERT_AXIS: &str = "ep";

/// The mesh axis of the replicas of a model that learns, over which parameters may be fully sharded.
const REPLICAS: &str = "dp";
