//! Sequences that are sharded over ranks, against one device.
mod counts;
mod harness;
mod masks;
mod order;
mod ways;
