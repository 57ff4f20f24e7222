//! Draws on a CUDA device, by the kernels of `draw.cu`.
use candle_core::cuda_backend::cudarc::driver::{DeviceRepr, LaunchConfig};
use candle_core::cuda_backend::{CudaDType, CudaStorage};
use candle_core::{CudaDevice, DType, Result, WithDType, bail};

use super::launch::{DrawLaunch, SOURCE};
use crate::nvrtc::{Kernels, Rounding};

static KERNELS: Kernels = Kernels::new("random/draw.cu", SOURCE, Rounding::Single);

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
    let kernel = KERNELS.get(device, launch.name)?;
    let Ok(len) = usize::try_from(launch.count) else {
        bail!("{} elements are more than a device can address", launch.count);
    };
    // SAFETY: the kernel below writes all elements, and the stream orders it before whatever reads them.
    let mut out = unsafe { device.alloc::<T>(len)? };
    let dims = device.clone_htod(&launch.dims)?;
    let rank = launch.dims.len() as u64 / 2;
    let [seed, id, first] = launch.stream;
    let [a, b] = launch.parameters.map(T::from_f64);
    let dims = dims.as_view();
    let mut call = kernel.call();
    call.value(&launch.count).value(&launch.base).value(&rank).read(&dims).write(&mut out);
    call.value(&seed).value(&id).value(&first).value(&a).value(&b);
    let config = LaunchConfig {
        grid_dim: (launch.blocks, 1, 1),
        block_dim: (DrawLaunch::THREADS, 1, 1),
        shared_mem_bytes: 0,
    };
    // SAFETY: the arguments are those of the kernel in number and type. It reads `2 * rank` elements of `dims` and writes
    // `count` elements of `out`.
    unsafe { call.launch(config) }?;
    Ok(CudaStorage::wrap_cuda_slice(out, device.clone()))
}
