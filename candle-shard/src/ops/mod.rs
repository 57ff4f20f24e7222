//! The ops of a [`DTensor`](crate::DTensor), one family a file, each a table of rows and a local computation.
pub(crate) mod dropout;
mod embedding;
pub(crate) mod fallback;
mod loss;
mod matmul;
mod pointwise;
mod reduce;
mod rowwise;
mod view;
