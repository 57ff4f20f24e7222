//! Attention over blocks of keys: a forward pass with the norms of each row, results that can be joined, and a backward
//! pass that computes the scores again.
//!
//! All ways to distribute attention stand on two facts (Milakov and Gimelshein 2018, Dao et al. 2022). Results over
//! different keys can be joined if the norms of the softmax are known. The gradient over a block of keys needs only the
//! norms over all keys, and the product of each row of the result with its gradient.
//!
#![doc = include_str!("README.md")]

mod attended;
mod backward;
#[cfg(feature = "cuda")]
mod cuda;
mod decode;
mod decode_block;
#[cfg(feature = "cuda")]
mod decode_cuda;
#[cfg(any(test, feature = "cuda"))]
mod decode_launch;
#[cfg(test)]
mod decode_text_tests;
mod forward;
mod heads;
#[cfg(any(test, feature = "cuda"))]
mod launch;
mod node;
mod off_host;
mod scale;
#[cfg(test)]
mod text_tests;
mod visible;

pub use attended::AttentionDtype;
pub use backward::AttentionBackward;
pub use decode::decode_attn;
pub use forward::{Partial, SoftmaxNorms};
pub(crate) use heads::AttentionSizes;
pub(crate) use node::{attend, graph_node};
pub use node::{join_all, sizes, split_sums, with_backward};
pub(crate) use off_host::attend_off_host;
pub use scale::Scale;
pub use visible::{KeyBlock, Visible};
