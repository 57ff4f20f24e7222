//! Implicit communication: refused, or logged.
use crate::scoped;
use candle_dist::DeviceMesh;
use candle_dist::switch::Switch;
use std::cell::Cell;

/// The treatment of implicit communication.
#[derive(Clone, Copy, PartialEq)]
pub(crate) enum StrictMode {
    /// It is logged.
    Told,
    /// It is an error.
    Refused,
    /// The running op needs communication by its nature.
    Inherent,
}

thread_local! {
    static MODE: Cell<StrictMode> = const { Cell::new(StrictMode::Told) };
}

/// Runs `f`, in which an op fails if it needs communication to lay out its inputs.
///
/// Explicit communication stays allowed: [`redistribute`](crate::DTensor::redistribute),
/// [`full_tensor`](crate::DTensor::full_tensor), [`to_scalar`](crate::DTensor::to_scalar), the layouts of
/// [styles](crate::parallel), backward passes, fully sharded units, and the exchange that an op needs by its nature, such as the row sums of a
/// softmax over a sharded dim. Outside of `strict`, the first such call of each kind is logged as a warning. On known
/// calls the check reads one flag.
///
/// `CANDLE_SHARD_STRICT=1` makes all worlds of a program strict; in a world of processes, that of rank 0 counts.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Result, Shard, strict};
///
/// World::threads(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 2)])?;
///     let x = Tensor::ones((4, 8, 16), DType::F32, &Device::Cpu)?;
///     let x = DTensor::distribute(&x, &mesh, &[Shard(1)])?;
///     let merged = || x.reshape((32, 16)); // each rank has a part of every four rows
///     let error = strict(merged).unwrap_err().to_string();
///     assert!(error.starts_with("reshape: f32[4, 8@tp, 16] would move by all_gather over tp, "), "{error}");
///     assert_eq!(merged()?.dims(), [32, 16]);
///     Ok(())
/// })?;
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
pub fn strict<R>(f: impl FnOnce() -> R) -> R {
    scoped::with(&MODE, StrictMode::Refused, f)
}

/// Runs the part of an op that communicates by the op's nature.
pub(crate) fn inherent<R>(f: impl FnOnce() -> R) -> R {
    scoped::with(&MODE, StrictMode::Inherent, f)
}

/// Returns how this thread treats implicit communication on a mesh now.
pub(crate) fn mode(mesh: &DeviceMesh) -> StrictMode {
    match MODE.get() {
        StrictMode::Told if mesh.is_on(Switch::Strict) => StrictMode::Refused,
        mode => mode,
    }
}
