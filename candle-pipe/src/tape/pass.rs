//! Backward passes, and forward passes that run twice.
//!
//! With the feature `shard` these are candle-shard's: its layers recompute segments and gather parameters in the backward
//! pass, and its random layers count their uses. Without it no layer does either, and candle's own pass is all.
#[cfg(feature = "shard")]
pub(crate) use candle_shard::nn::{Draws, backward};

#[cfg(not(feature = "shard"))]
pub(crate) use plain::{Draws, backward};

#[cfg(not(feature = "shard"))]
mod plain {
    use crate::Result;
    use candle_core::Tensor;
    use candle_core::backprop::GradStore;

    /// Runs the backward pass of a scalar.
    pub(crate) fn backward(loss: &Tensor) -> Result<GradStore> {
        Ok(candle_dist::edges::backward(loss)?)
    }

    /// The random draws of a run. There are none: [`Ctx::random`](crate::Ctx::random) draws by row, the same each time.
    #[derive(Debug, Clone)]
    pub(crate) struct Draws;

    impl Draws {
        /// Runs `f` and returns its result with its draws.
        pub(crate) fn of<T>(f: impl FnOnce() -> Result<T>) -> Result<(T, Self)> {
            Ok((f()?, Self))
        }

        /// Runs `f` with these draws and returns its result.
        pub(crate) fn again<T>(&self, f: impl FnOnce() -> Result<T>) -> Result<T> {
            f()
        }
    }
}
