//! Training a decoder on texts: on a mesh of pipelines, replicas and tensor-parallel ranks, and on another one after a stop.

pub mod base;
pub mod corpus;
pub mod data;
pub mod folder;
pub mod frozen;
pub mod job;
mod local;
pub mod loop_state;
pub mod metrics;
mod preference;
pub mod rate;
pub mod recipe;
pub mod resume;
mod save;
pub mod scaler;
pub(crate) mod stage_files;
pub mod trainer;
mod valid;
