//! Processes as the ranks of a world.
use super::backends::{self, BackendKind};
use super::context::RankContext;
use crate::control::Control;
use crate::launch::{InitOptions, LaunchInfo};
use crate::{Cause, Error, ProcessGroup, Result, backend, threads};
use std::sync::Arc;

/// Joins the world of processes that a launcher started, as one of its ranks.
///
/// Returns when all processes have joined. Dropping the context ends the rank, and does not tell whether others fail later.
/// [`World::processes`] and [`RankContext::run`] do, and report how the rank ended.
///
/// ```no_run
/// use candle_dist::init::{BackendKind, InitOptions};
/// use candle_dist::{ReduceOp, init_process_group};
/// # use candle_core::{Device, Tensor};
///
/// let ctx = init_process_group(BackendKind::Auto, InitOptions::new())?;
/// let ranks = ctx.group().all_reduce(&Tensor::new(&[1f32], &Device::Cpu)?, ReduceOp::Sum)?;
/// # Ok::<(), candle_dist::Error>(())
/// ```
///
/// [`World::processes`]: crate::World::processes
pub fn init_process_group(backend: BackendKind, options: InitOptions) -> Result<RankContext> {
    let info = LaunchInfo::from_env(&options);
    // A build without backends is reported first, because that error needs no launcher.
    let candidates = backends::candidates(backend, info.as_ref().ok())?;
    let info = info?;
    meet(&info, options, |info, control| backends::choose(&candidates, info, control)?(info, control))
}

/// Like [`init_process_group`] with your own backend, which `start` creates once all processes have met.
pub fn init_process_group_with(
    options: InitOptions,
    start: impl FnOnce(&LaunchInfo, &Arc<Control>) -> Result<Arc<dyn backend::Backend>>,
) -> Result<RankContext> {
    meet(&LaunchInfo::from_env(&options)?, options, start)
}

/// Meets the other processes and starts the backend.
fn meet(
    info: &LaunchInfo,
    options: InitOptions,
    start: impl FnOnce(&LaunchInfo, &Arc<Control>) -> Result<Arc<dyn backend::Backend>>,
) -> Result<RankContext> {
    threads::check(options.threads_per_rank).map_err(Error::Init)?;
    threads::settle(options.threads_per_rank.unwrap_or_else(|| threads::default_of_process(info.local_size)));
    let control = Control::connect(info, &options)?;
    match start(info, &control) {
        Ok(backend) => Ok(RankContext::of_process(control, ProcessGroup::new(backend))),
        Err(Error::Group(failure)) => Err(Error::Group(failure)),
        // The other ranks may be about to wait for this rank's backend.
        Err(error) => Err(control.fail(Cause::Failed { rank: info.rank, message: error.to_string() })),
    }
}
