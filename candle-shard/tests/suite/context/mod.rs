//! Sequences that are sharded over ranks, against one device.
mod block;
mod cache;
mod counts;
mod halos;
mod harness;
mod masks;
mod not_numbers;
mod order;
mod random;
mod ways;
