//! Implicit communication: refused, or logged.
use crate::rules::Plan;
use crate::{DTensor, Error, Result, scoped};
use itertools::Itertools;
use std::cell::Cell;
use std::panic::Location;
use std::sync::LazyLock;
use std::sync::atomic::Ordering::Relaxed;

/// The treatment of implicit communication.
#[derive(Clone, Copy, PartialEq)]
enum Mode {
    Told,
    Refused,
    /// The running op needs communication by its nature.
    Inherent,
}

thread_local! {
    static MODE: Cell<Mode> = Cell::new(if *EVERYWHERE { Mode::Refused } else { Mode::Told });
}

/// Set if the environment enables it for the whole program.
static EVERYWHERE: LazyLock<bool> =
    LazyLock::new(|| std::env::var_os("CANDLE_SHARD_STRICT").is_some_and(|value| !value.is_empty() && value != "0"));

/// Runs `f`, in which an op fails if it needs communication to lay out its inputs.
///
/// Explicit communication stays allowed: [`redistribute`](DTensor::redistribute),
/// [`full_tensor`](DTensor::full_tensor), [`to_scalar`](DTensor::to_scalar), the layouts of [styles](crate::parallel),
/// backward passes, fully sharded units, and the exchange that an op needs by its nature, such as the row sums of a
/// softmax over a sharded dim. Outside of `strict`, the first such call of each kind is logged as a warning. On known
/// calls the check reads one flag.
///
/// `CANDLE_SHARD_STRICT=1` in the environment makes all threads of a program strict.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Result, Shard, strict};
///
/// World::local(2).run(|ctx| -> Result<()> {
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
    scoped::with(&MODE, Mode::Refused, f)
}

/// Runs the part of an op that communicates by the op's nature.
pub(crate) fn inherent<R>(f: impl FnOnce() -> R) -> R {
    scoped::with(&MODE, Mode::Inherent, f)
}

/// Within [`strict`], refuses a call whose plan communicates; otherwise logs it once.
pub(crate) fn unasked(
    op: &'static str,
    inputs: &[&DTensor],
    plan: &Plan,
    site: &'static Location<'static>,
) -> Result<()> {
    let mode = MODE.get();
    if mode == Mode::Inherent || mode == Mode::Told && plan.told.swap(true, Relaxed) {
        return Ok(());
    }
    let moving = inputs.iter().zip(&plan.inputs).map(|(input, moves)| {
        let steps = moves.iter().filter(|step| step.communicates());
        let steps = steps.map(|step| {
            format!("by {} over {}, {} bytes received by a rank at most", step.name(), step.axis_names(), step.received)
        });
        (input.spec(), steps.collect_vec())
    });
    let moving = moving.filter(|(_, steps)| !steps.is_empty());
    let what = moving.map(|(spec, steps)| format!("{spec} would move {}", steps.join(" and "))).join("; ");
    let (file, line) = (site.file(), site.line());
    if mode == Mode::Refused {
        let fix = "redistribute it before, or leave strict";
        return Error::op(op, format!("{what}; called at {file}:{line}: {fix}"));
    }
    if inputs[0].mesh().coordinate().iter().all(|&at| at == 0) {
        log::warn!("{op} at {file}:{line} communicates to lay out its inputs: {what}");
    }
    Ok(())
}
