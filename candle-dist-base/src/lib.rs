//! What communication (`candle-dist`) and kernels (`candle-dist-kernels`) of [candle](https://github.com/huggingface/candle) tensors
//! stand on: nodes of the graph, results that exist before their nodes, tensors without elements, bits and reductions.
//!
//! `candle-dist` re-exports what its users need. It knows nothing of ranks.
pub mod bits;
#[doc(hidden)]
pub mod edges;
pub mod empty;
mod fresh;
mod reduce_op;
mod strips;
mod sums;

pub use fresh::{Fresh, Ready, dense};
pub use reduce_op::{Factor, ReduceOp};
pub use strips::{StripBuffer, StripCopy};
pub use sums::{square_sum, sum_dtype};
