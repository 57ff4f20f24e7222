//! The program `lm`: a decoder from the Hub's files or a GGUF file, cut over ranks, that writes on from a prompt, scores
//! a text, or is trained on one.
//!
#![doc = include_str!("README.md")]

pub mod args;
pub mod batch;
mod between;
pub mod cache;
pub mod chat;
mod check;
pub mod command;
pub mod config;
pub mod cut;
pub mod declare;
pub mod dtype;
pub mod engine;
mod expert_files;
mod feed_forward;
pub mod files;
mod flags;
pub mod generate;
mod gguf;
mod help;
pub mod hub;
pub mod info;
mod layer;
pub mod memory;
pub mod model;
mod norm;
pub mod opened;
mod projection;
pub mod random_model;
pub mod report;
mod rope;
pub mod sample;
pub mod score;
pub mod session;
mod special_tokens;
pub mod staged;
pub mod step;
pub mod stops;
pub mod tokens;
pub mod train;
mod writing;

/// The mesh axis over which layers are cut, experts too.
const LAYER_AXIS: &str = "tp";

/// The mesh axis over which the tokens of a text are distributed.
const TOKEN_AXIS: &str = "cp";

/// The mesh axis over which experts are distributed.
const EXPERT_AXIS: &str = "ep";

/// The mesh axis of the replicas of a model that learns, over which parameters may be fully sharded.
const REPLICAS: &str = "dp";
