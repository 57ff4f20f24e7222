//! Scoring a text: how likely a model finds it.

pub mod args;
pub mod program;
pub mod report;
