//! Training.

pub mod args;
pub mod job;
pub mod report;
pub mod resume;
pub mod run;
mod screen;
mod tensorboard;
