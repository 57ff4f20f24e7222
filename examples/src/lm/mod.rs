//! The program `lm`: a decoder from the Hub's files or a GGUF file, cut over ranks, that writes on from a prompt or is
//! trained on a text.

pub mod args;
pub mod cache;
pub mod config;
pub mod declare;
pub mod files;
pub mod generate;
mod gguf;
pub mod info;
mod layer;
pub mod model;
mod norm;
mod projection;
pub mod random_model;
pub mod report;
mod rope;
pub mod sample;
pub mod staged;
pub mod stops;
pub mod tokens;
pub mod train;
