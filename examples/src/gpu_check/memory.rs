//! Checks that the GPU's memory is freed.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_dist::{Collective, ProcessGroup, ReduceOp};

use super::Ranks;

const STEPS: usize = 1000;
const ELEMENTS: usize = 1 << 18;

/// Far less than the steps allocate, and more than the rounding of a pool.
const ALLOWED: usize = 64 << 20;

/// Compares the free memory before and after many steps, each of which allocates a few megabytes.
pub(super) fn check(ranks: &Ranks) -> Result<String> {
    let steps = if ranks.small { 20 } else { STEPS };
    let lost = ranks.run(|ctx| {
        let (group, device) = (ctx.group(), ctx.device());
        (0..10).try_for_each(|_| step(group, device))?;
        let before = free(group, device)?;
        (0..steps).try_for_each(|_| step(group, device))?;
        Ok(before.saturating_sub(free(group, device)?))
    })?;
    let lost = lost.into_iter().max().unwrap_or(0);
    ensure!(
        lost <= ALLOWED,
        "{lost} bytes did not come back after {steps} steps; {ALLOWED} may stay in pools"
    );
    Ok(format!("{lost} bytes less free after {steps} steps"))
}

fn step(group: &ProcessGroup, device: &Device) -> candle_dist::Result<()> {
    let x = Tensor::ones(ELEMENTS, DType::F32, device)?;
    let started = group.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
    group.all_gather(&x, 0)?;
    started.wait().map(drop)
}

/// Returns the GPU's free memory after all ranks have freed theirs.
fn free(group: &ProcessGroup, device: &Device) -> Result<usize> {
    device.synchronize()?;
    group.barrier()?;
    let (free, _) = device.as_cuda_device()?.cuda_stream().context().mem_get_info()?;
    group.barrier()?;
    Ok(free)
}
