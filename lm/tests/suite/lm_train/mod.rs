//! A Llama that learns: the numbers of plain candle on every mesh, before and after a stop.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod adapter_options;
mod adapters;
mod broken;
mod codes;
mod crash;
mod families;
mod frozen;
mod local;
mod metrics;
mod nonfinite;
mod packed;
mod parity;
mod plain;
mod preferences;
mod program;
mod records;
mod resume;
mod retention;
mod set_ups;
#[cfg(unix)]
mod signals;
pub(crate) mod support;
