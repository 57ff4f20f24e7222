//! A Llama that learns: the numbers of plain candle on every mesh, before and after a stop.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod broken;
mod crash;
mod families;
mod packed;
mod parity;
mod plain;
mod program;
mod records;
mod resume;
pub(crate) mod support;
