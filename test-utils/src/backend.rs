//! The backend on which tests run: `CANDLE_TEST_BACKEND` is `local` (the default) or `nccl`.
use candle_dist::World;
use std::ops::RangeInclusive;

/// Returns whether tests run over NCCL.
///
/// # Panics
/// If the backend is unknown.
pub fn over_nccl() -> bool {
    match std::env::var("CANDLE_TEST_BACKEND").as_deref() {
        Err(_) | Ok("local") => false,
        Ok("nccl") => true,
        Ok(other) => panic!("CANDLE_TEST_BACKEND={other}; use local or nccl"),
    }
}

/// Returns the sizes of worlds in `range` that the backend can run: over NCCL, as many ranks as there are GPUs.
///
/// # Panics
/// If the backend is unknown, or not in this build.
pub fn worlds(range: RangeInclusive<usize>) -> Vec<usize> {
    match over_nccl() {
        false => range.collect(),
        true => [gpus()].into_iter().filter(|size| range.contains(size)).collect(),
    }
}

#[cfg(feature = "nccl")]
fn gpus() -> usize {
    let found = (0..).take_while(|&ordinal| candle_core::Device::new_cuda_with_stream(ordinal).is_ok());
    static COUNT: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    *COUNT.get_or_init(|| found.count())
}

#[cfg(not(feature = "nccl"))]
fn gpus() -> usize {
    panic!("CANDLE_TEST_BACKEND=nccl needs the cargo feature nccl of test-utils")
}

/// Returns a world of threads over the backend, each on a GPU of its own if there are GPUs.
#[cfg(feature = "nccl")]
pub(crate) fn world(size: usize) -> Result<World, String> {
    if !over_nccl() {
        return Ok(World::local(size));
    }
    let devices = (0..size).map(candle_core::Device::new_cuda_with_stream);
    let devices = devices.collect::<candle_core::Result<Vec<_>>>();
    devices.map(World::nccl).map_err(|error| format!("{size} ranks need {size} GPUs: {error}"))
}

#[cfg(not(feature = "nccl"))]
pub(crate) fn world(size: usize) -> Result<World, String> {
    if over_nccl() { Err(format!("{} GPUs", gpus())) } else { Ok(World::local(size)) }
}
