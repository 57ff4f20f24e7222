//! The Llama program: a model from the Hub's files, cut over ranks, that writes on from a prompt or is trained on a text.

pub mod args;
pub mod cache;
pub mod config;
pub mod declare;
pub mod files;
pub mod generate;
mod layer;
pub mod model;
pub mod random_model;
pub mod report;
mod rope;
pub mod sample;
pub mod staged;
pub mod tokens;
pub mod train;
