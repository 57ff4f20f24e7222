//! The tensors that enter a collective, and the memory of its results.
use candle_core::Tensor;
use smallvec::SmallVec;

pub use candle_dist_base::{Fresh, Ready};

/// The tensors of one rank in a collective: one, unless the call is coalesced.
pub type Tensors = SmallVec<[Tensor; 1]>;

/// The results of one rank in a collective.
pub type Results = SmallVec<[Fresh; 1]>;

/// Returns the size of a tensor's elements in bytes.
pub(crate) fn bytes(tensor: &Tensor) -> usize {
    tensor.elem_count() * tensor.dtype().size_in_bytes()
}
