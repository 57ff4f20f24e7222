//! The integration tests, in four binaries: this one has ops and `DTensor`, `nn.rs` layers, `tables.rs` tables, and `files.rs` what is on
//! disks. Each other file or folder is a subject.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod common;
mod context;
mod errors;
mod factory;
mod faults_dispatch;
mod faults_elementwise;
mod faults_layers;
mod faults_listed;
mod faults_views;
mod fused_device;
mod kernels;
mod mistakes;
mod ops;
mod plain;
mod programs;
mod random;
mod random_device;
mod random_meshes;
mod redistribute;
mod redistribute_counts;
mod rows_device;
mod rules;
mod spec;
mod visualize;

test_utils::settle_threads!();
