//! Backward passes that leave the gradients of units on their ranks.
use crate::scoped;
use std::cell::Cell;

thread_local! {
    static IS_ON: Cell<bool> = const { Cell::new(false) };
}

/// Runs `f`, whose backward passes keep the gradients of units whole on each rank, until a backward pass outside of it adds them to
/// its own and sums all over the ranks: PyTorch's `no_sync`.
///
/// Passes over parts of a batch then cost one reduce_scatter of each unit together, and the memory of its whole gradients between
/// them. The last pass must be outside. It returns the gradients of units of all passes as one, so passes count alike: use
/// [`GradAccumulator::add`](candle_dist::GradAccumulator::add), and scale the loss of a pass with another number of rows. An
/// accumulator refuses unlike weights of these passes. The last pass may reach other units, or none. A failed pass drops the kept
/// gradients, and so does [`discard_grads`](super::discard_grads). Dropping the accumulator does not.
///
/// Parameters outside of units get gradients in each pass. Sum those over the ranks once, by
/// [`Parameters::reduce`](crate::nn::Parameters::reduce) at the end.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist::{GradAccumulator, World};
/// use candle_shard::fsdp::{FullyShard, FullyShardOptions, no_sync};
/// use candle_shard::nn::{Linear, MeshVarBuilder};
/// use candle_shard::parallel::Plan;
/// use candle_shard::{DTensor, Result, Shard};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("fsdp", 2)])?;
///     let vb = MeshVarBuilder::fresh(42, &mesh, Plan::none(), DType::F32, &Device::Cpu)?;
///     let vb = vb.fully_shard("fsdp", FullyShardOptions::default())?;
///     let layer = FullyShard::new(&vb.pp("layer"), |vb| Linear::new(4, 6, false, vb))?;
///     let parameters = vb.finish()?;
///     let x = DTensor::ones((2, 4), DType::F32, &Device::Cpu, &mesh, &[Shard(0)])?;
///     let pass = || layer.run(|layer| layer.forward(&x))?.mean_all()?.backward();
///     let mut sum = GradAccumulator::new(&parameters.vars());
///     for _ in 0..3 {
///         sum.add(&no_sync(pass)?)?; // nothing is sent for gradients
///     }
///     sum.add(&pass()?)?;
///     let mut grads = sum.mean()?;
///     parameters.reduce(&mut grads)?;
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn no_sync<R>(f: impl FnOnce() -> R) -> R {
    scoped::with(&IS_ON, true, f)
}

/// Returns whether gradients stay on their ranks now.
pub(super) fn is_on() -> bool {
    IS_ON.get()
}
