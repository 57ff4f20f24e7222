//! Options of units.
use candle_core::DType;

/// How units gather their parameters and reduce their gradients: start from the default, and set what differs.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub struct FullyShardOptions {
    /// The dtype in which parameters are gathered and computed; `None` for the dtype in which they are stored.
    ///
    /// With parameters stored in `F32` and computed in `BF16`, the pieces are the optimizer's master copy.
    pub param_dtype: Option<DType>,
    /// The dtype in which gradients are summed over the ranks. `None` means f32 where parameters are computed in 16
    /// bits, and otherwise the dtype of the gradients. `Some(DType::BF16)` halves the traffic of bf16 gradients.
    pub reduce_dtype: Option<DType>,
    /// Whether the whole parameters are dropped between a unit's forward and backward pass, to save memory, or kept, to
    /// save one all_gather.
    pub reshard_after_forward: bool,
    /// Whether a unit that starts also starts the all_gather of the next one: in the order of their construction or, in
    /// the backward pass, in reverse.
    pub prefetch: bool,
    /// Whether code outside of this crate, such as an optimizer of candle or `Var::set`, may write to parameters between the runs of
    /// two units, one behind the other. Optimizers, loads and ops of this crate always may.
    ///
    /// The ranks then compare each prefetched unit with its parameters when it runs, and the host waits for the device. Without such
    /// code, set it to `false`: a write that is made nevertheless is seen one run later. All ranks must set the same.
    pub foreign_writes: bool,
}

impl Default for FullyShardOptions {
    fn default() -> Self {
        Self {
            param_dtype: None,
            reduce_dtype: None,
            reshard_after_forward: true,
            prefetch: true,
            foreign_writes: true,
        }
    }
}

impl FullyShardOptions {
    /// Sets the dtype in which parameters are gathered and computed.
    pub fn param_dtype(self, param_dtype: impl Into<Option<DType>>) -> Self {
        Self { param_dtype: param_dtype.into(), ..self }
    }

    /// Sets the dtype in which gradients are summed over the ranks.
    pub fn reduce_dtype(self, reduce_dtype: impl Into<Option<DType>>) -> Self {
        Self { reduce_dtype: reduce_dtype.into(), ..self }
    }

    /// Sets whether the whole parameters are dropped between the forward and the backward pass.
    pub fn reshard_after_forward(self, reshard_after_forward: bool) -> Self {
        Self { reshard_after_forward, ..self }
    }

    /// Sets whether a unit that starts also starts the all_gather of the next one.
    pub fn prefetch(self, prefetch: bool) -> Self {
        Self { prefetch, ..self }
    }

    /// Sets whether code outside of this crate may write to parameters between the runs of two units.
    pub fn foreign_writes(self, foreign_writes: bool) -> Self {
        Self { foreign_writes, ..self }
    }
}
