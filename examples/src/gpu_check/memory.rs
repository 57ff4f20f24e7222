//! Checks that the GPU's memory is freed.

use anyhow::{Result, ensure};
use candle_core::cuda_backend::cudarc::driver::{result, sys};
use candle_core::{DType, Device, Tensor};
use candle_dist::{Collective, ProcessGroup, ReduceOp};

use super::Ranks;

const STEPS: usize = 1000;
const ELEMENTS: usize = 1 << 18;

/// Far less than the steps allocate, and more than what one step has in flight.
const ALLOWED: u64 = 64 << 20;

/// Compares the memory in use before and after many steps, each of which allocates a few megabytes. Pools keep what is freed, so the
/// GPU's free memory would not tell.
pub(super) fn check(ranks: &Ranks) -> Result<String> {
    let steps = if ranks.small { 20 } else { STEPS };
    let lost = ranks.run(|ctx| {
        let (group, device) = (ctx.group(), ctx.device());
        (0..10).try_for_each(|_| step(group, device))?;
        let before = used(group, device)?;
        (0..steps).try_for_each(|_| step(group, device))?;
        Ok(used(group, device)?.saturating_sub(before))
    })?;
    let lost = lost.into_iter().max().unwrap_or(0);
    ensure!(
        lost <= ALLOWED,
        "{lost} bytes did not come back after {steps} steps; {ALLOWED} may stay in pools"
    );
    Ok(format!("{lost} bytes more in use after {steps} steps"))
}

fn step(group: &ProcessGroup, device: &Device) -> candle_dist::Result<()> {
    let x = Tensor::ones(ELEMENTS, DType::F32, device)?;
    let started = group.call(Collective::AllReduce(ReduceOp::Sum)).start(&x)?;
    group.all_gather(&x, 0)?;
    started.wait().map(drop)
}

/// Returns how many bytes of the GPU's memory pool are in use after all ranks have freed theirs.
fn used(group: &ProcessGroup, device: &Device) -> Result<u64> {
    device.synchronize()?;
    group.barrier()?;
    let gpu = device.as_cuda_device()?.cuda_stream().context().cu_device();
    let (attribute, mut used) = (sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT, 0u64);
    // SAFETY: the GPU and its pool exist, since a context is alive, and the driver writes a number of 64 bits to valid memory.
    unsafe {
        let pool = result::device::get_default_mem_pool(gpu)?;
        result::mem_pool::get_attribute(pool, attribute, (&raw mut used).cast())?;
    }
    group.barrier()?;
    Ok(used)
}
