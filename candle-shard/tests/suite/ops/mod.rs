//! Every op in every layout of its inputs, on every mesh, against one device: value and gradients.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod attention;
mod candle_methods;
pub(crate) mod complete;
mod embedding;
mod exchanges;
mod explained;
mod extreme;
mod images;
mod in_place;
mod join;
mod leaves;
mod limits;
mod lookup;
mod losses;
mod matmul;
mod names;
mod order;
mod pointwise;
mod reduce;
mod rows;
mod sizes;
mod slice;
mod strict;
mod sweep;
mod unary;
mod view;
mod whole;
