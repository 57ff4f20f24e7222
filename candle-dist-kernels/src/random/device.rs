//! Draws on a CUDA device, by the kernels of `draw.cu`.
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, LaunchConfig, PushKernelArg};
use candle_core::cuda_backend::{CudaDType, CudaStorage, WrapErr};
use candle_core::{CudaDevice, DType, Result, WithDType, bail};

use super::launch::{DrawLaunch, SOURCE};
use crate::nvrtc::Kernels;

static KERNELS: Kernels = Kernels::new("candle_dist_kernels_random", SOURCE);

/// Draws the block of a launch in f32 or f64. `launch` has at least one element.
pub(super) fn draw(launch: &DrawLaunch, dtype: DType, device: &CudaDevice) -> Result<CudaStorage> {
    match dtype {
        DType::F64 => draw_as::<f64>(launch, device),
        _ => draw_as::<f32>(launch, device),
    }
}

fn draw_as<T: WithDType + CudaDType + DeviceRepr>(
    launch: &DrawLaunch,
    device: &CudaDevice,
) -> Result<CudaStorage> {
    let kernel = device.get_or_load_custom_func(launch.name, KERNELS.name(), KERNELS.ptx()?)?;
    let Ok(len) = usize::try_from(launch.count) else {
        bail!("{} elements are more than a device can address", launch.count);
    };
    // SAFETY: the kernel below writes all elements, and the stream orders it before whatever reads them.
    let mut out = unsafe { device.alloc::<T>(len)? };
    let dims = device.clone_htod(&launch.dims)?;
    let rank = launch.dims.len() as u64 / 2;
    let [seed, id, first] = launch.stream;
    let [a, b] = launch.parameters.map(T::from_f64);
    let mut builder = kernel.builder();
    builder.arg(&launch.count).arg(&launch.base).arg(&rank).arg(&dims).arg(&mut out);
    builder.arg(&seed).arg(&id).arg(&first).arg(&a).arg(&b);
    let config = LaunchConfig {
        grid_dim: (launch.blocks, 1, 1),
        block_dim: (DrawLaunch::THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the arguments are those of the kernel in number and type. It reads `2 * rank` elements of `dims` and writes
    // `count` elements of `out`.
    unsafe { builder.launch(config) }.w()?;
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}
