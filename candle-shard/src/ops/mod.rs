//! The ops of a [`DTensor`](crate::DTensor), one family a file, each a table of rows and a local computation.
pub(crate) mod dropout;
pub(crate) mod fallback;
mod join;
mod lookup;
mod loss;
mod matmul;
mod pointwise;
mod reduce;
mod reshape;
mod rowwise;
mod scatter;
mod slice;
mod view;
