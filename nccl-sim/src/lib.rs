//! A simulated CUDA driver and NCCL, on which the NCCL backend is tested without a GPU.
//!
//! One shared library stands for `libcuda`, `libnccl`, `libcublas`, `libcublasLt`, `libcurand`, `libcudart` and
//! `libnvrtc`: `scripts/nccl-sim.sh` builds it, links the tests with it under these names, and runs them. A function
//! that is linked and not modeled ends the process with its name.
//!
//! - Device memory is host memory. Fresh and freed memory holds NaN.
//! - Streams run their work in any order that CUDA allows; `SIM_SEED` chooses it.
//! - A race detector compares every access with the accesses before it, by vector clocks. Its verdict does not depend on
//!   the order in which work happened to run.
//! - Where NVIDIA's documents leave something open, the stricter reading holds.
//!
//! The variables are in `settings.rs`.
#![allow(non_snake_case, reason = "the names of exported functions are NVIDIA's")]
#![allow(clippy::too_many_arguments, reason = "the signatures of exported functions are NVIDIA's")]
mod abi;
mod blas;
mod clock;
mod driver;
mod engine;
mod kernels;
mod launch;
mod memory;
mod nccl;
mod number;
mod nvrtc;
mod random;
mod report;
mod settings;
mod tally;
#[cfg(test)]
mod tests;

include!(concat!(env!("OUT_DIR"), "/unmodeled.rs"));
