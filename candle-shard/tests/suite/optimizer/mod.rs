//! Optimizers of shards: PyTorch's steps on every layout, state that goes on on any mesh, groups, and what is sent.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod adam_w;
mod backward;
mod facts;
mod groups;
mod local_sgd;
mod meshes;
mod options;
mod schedule;
mod unfreeze;
