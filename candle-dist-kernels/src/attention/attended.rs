//! The dtypes that attention computes in.
use super::visible::KeyBlock;
use super::{AttentionBackward, Partial, Scale, backward, node};
use crate::{element::change, real::Real};
use candle_core::{Result, Tensor};

/// A dtype that attention computes in, with its kernels: this crate compiles them once, and not every caller again.
pub trait AttentionDtype: Real {
    /// Attention over blocks of keys, without a graph.
    fn partial_of_blocks(inputs: [&Tensor; 3], scale: Scale, blocks: &[KeyBlock]) -> Result<Partial<Self>>;

    /// Returns a known result over these blocks of keys as a graph node, beside the scale with log sums or without them. The norms may be those over more keys; then the
    /// gradients are those through these blocks only.
    fn with_result(
        inputs: [&Tensor; 3],
        whole: Partial<Self>,
        scale: (Scale, bool),
        blocks: Vec<KeyBlock>,
    ) -> Result<Tensor>;

    /// Returns the product of each row of the result over all keys, which has `width` values and perhaps a logarithm behind them, with its
    /// gradient.
    fn inner(out: &Tensor, grad: &Tensor, width: usize) -> Result<Vec<Self>>;

    /// Adds the gradients through blocks of the rows of a key and a value: that of the query to `of_query`, and those of
    /// the key and the value to `of_keys`, a tensor `[batch, len]` in memory that nothing else uses. For each element of
    /// the batch `of_keys` has that of the key, then that of the value.
    fn add_gradients(
        work: &AttentionBackward<'_, Self>,
        inputs: [&Tensor; 2],
        blocks: &[KeyBlock],
        of_query: &mut [Self],
        of_keys: &Tensor,
    ) -> Result<()>;
}

macro_rules! attended {
    ($($float:ty),*) => {$(
        impl AttentionDtype for $float {
            fn partial_of_blocks(inputs: [&Tensor; 3], scale: Scale, blocks: &[KeyBlock]) -> Result<Partial<Self>> {
                node::partial_of_blocks(inputs, scale, blocks)
            }

            fn with_result(
                inputs: [&Tensor; 3],
                whole: Partial<Self>,
                scale: (Scale, bool),
                blocks: Vec<KeyBlock>,
            ) -> Result<Tensor> {
                node::with_result(inputs, whole, scale, blocks)
            }

            fn inner(out: &Tensor, grad: &Tensor, width: usize) -> Result<Vec<Self>> {
                backward::inner(out, grad, width)
            }

            fn add_gradients(
                work: &AttentionBackward<'_, Self>,
                inputs: [&Tensor; 2],
                blocks: &[KeyBlock],
                of_query: &mut [Self],
                of_keys: &Tensor,
            ) -> Result<()> {
                change(of_keys, |of_keys| work.add(inputs, blocks, of_query, of_keys))
            }
        }
    )*};
}

attended!(f32, f64);
