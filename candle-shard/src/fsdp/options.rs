//! What can be chosen.
use candle_core::DType;

/// How units gather their parameters and reduce their gradients.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FullyShardOptions {
    /// What parameters are gathered and computed in; `None` for what they are held in.
    ///
    /// With parameters held in `F32` and computed in `BF16`, what a rank holds is the master copy of an optimiser.
    pub param_dtype: Option<DType>,
    /// What gradients are summed in over the ranks; `None` for f32 where parameters are computed in 16 bits, and else for
    /// what they come in. `Some(DType::BF16)` halves what bf16 gradients send.
    pub reduce_dtype: Option<DType>,
    /// Whether the whole parameters are dropped between a unit's forward and its backward pass, for memory, or kept, for
    /// one all_gather less.
    pub reshard_after_forward: bool,
    /// Whether a unit that starts also starts the all_gather of the one that comes next, in the order in which they were
    /// built or, in the backward pass, against it.
    pub prefetch: bool,
}

impl Default for FullyShardOptions {
    fn default() -> Self {
        Self { param_dtype: None, reduce_dtype: None, reshard_after_forward: true, prefetch: true }
    }
}
