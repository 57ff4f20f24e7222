#![doc = include_str!("../README.md")]

pub mod adapters;
pub mod args;
pub mod batch;
pub mod bench_serve;
pub mod chat;
mod check;
pub mod command;
mod download;
pub mod export;
mod flags;
mod help;
pub mod info;
pub mod input;
pub mod located;
pub mod memory;
pub mod merge;
pub mod opened;
pub mod report;
pub mod score;
pub mod serve;
pub mod train;
mod values;
