//! The ops of a [`DTensor`](crate::DTensor), one family a file, each a table of rows and a local computation.
mod compare;
pub(crate) mod dropout;
mod embedding;
mod extreme;
pub(crate) mod fallback;
mod loss;
mod matmul;
pub(crate) mod operand;
mod operators;
mod order;
mod pointwise;
mod reduce;
mod rowwise;
mod scan;
mod softmax;
mod unary;
mod view;
