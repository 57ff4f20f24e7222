//! What the driver does and costs: single ops, copies, tensors without elements, streams that share a queue of the GPU.

use std::fmt::Write;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result, ensure};
use candle_core::cuda_backend::cudarc::driver::{
    CudaContext, CudaSlice, CudaStream, DevicePtrMut, LaunchConfig, PushKernelArg, result, sys,
};
use candle_core::cuda_backend::cudarc::nvrtc::compile_ptx;
use candle_core::{DType, Device, Tensor};

use crate::timing::median;

/// One kernel waits for a flag that the other one raises, or until it has looked often enough.
const FLAG: &str = r#"
extern "C" __global__ void await_flag(volatile unsigned *flag, unsigned *looks, unsigned most) {
  unsigned n = 0;
  while (n < most && *flag == 0) ++n;
  *looks = n;
}
extern "C" __global__ void raise_flag(volatile unsigned *flag) { *flag = 1; }
"#;

/// How often the first kernel looks: some tens of milliseconds on an H100.
const MOST: u32 = 100_000;

/// Streams that wait for the first kernel, while another one raises the flag.
const PARKED: usize = 40;

/// Returns a line for each finding.
pub(super) fn check(device: &Device, small: bool) -> Result<String> {
    let (ops, rounds) = if small { (20, 3) } else { (1000, 9) };
    let mut found = String::from("the driver");
    let mut number =
        |name: &str, value: f64, unit: &str| writeln!(found, "\nNUMBER {name}: {value:.2} {unit}");
    let context = device.as_cuda_device()?.cuda_stream().context().clone();
    number("bytes that the pool keeps when the GPU has no work", threshold(&context)? as f64, "B")?;

    let x = Tensor::ones(1024, DType::F32, device)?;
    let row = Tensor::ones((1, 32), DType::F32, device)?;
    let table = x.reshape((32, 32))?;
    let affine = || x.affine(2.0, 1.0).map(drop);
    let broadcast = || table.broadcast_add(&row).map(drop);
    let ops_of: [(&str, &dyn Fn() -> candle_core::Result<()>); 2] =
        [("an op of 4 KiB", &affine), ("an op that broadcasts 4 KiB", &broadcast)];
    for (name, op) in ops_of {
        let (mut host, mut whole) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            device.synchronize()?;
            let began = Instant::now();
            (0..ops).try_for_each(|_| op())?;
            host.push(began.elapsed().as_secs_f64() * 1e6 / f64::from(ops));
            device.synchronize()?;
            whole.push(began.elapsed().as_secs_f64() * 1e6 / f64::from(ops));
        }
        number(&format!("{name}, on the host"), median(&mut host), "µs")?;
        number(&format!("{name}, until done"), median(&mut whole), "µs")?;
    }

    let sizes: &[usize] = if small { &[1 << 20] } else { &[64 << 20, 1 << 30] };
    for &bytes in sizes {
        let x = Tensor::ones(bytes / 4, DType::F32, device)?;
        let mut times = Vec::new();
        for _ in 0..rounds {
            device.synchronize()?;
            let began = Instant::now();
            black_box(x.force_contiguous()?);
            device.synchronize()?;
            times.push(began.elapsed().as_secs_f64());
        }
        number(&format!("copy of {} MiB", bytes >> 20), 2e-9 * bytes as f64 / median(&mut times), "GB/s")?;
    }

    let nothing = Tensor::zeros((0, 4), DType::F32, device)?;
    ensure!(nothing.to_device(&Device::Cpu)?.elem_count() == 0, "a tensor without elements has some");
    // A simulated GPU runs a kernel whole, so it would wait in vain, and calls the flag a race.
    if !small {
        let blocked = blocked(&context, rounds).context("streams that share a queue")?;
        number(&format!("starts of {rounds} that waited behind {PARKED} other streams"), blocked as f64, "")?;
    }
    Ok(found)
}

/// What the memory pool of a GPU keeps when it waits for the GPU.
fn threshold(context: &Arc<CudaContext>) -> Result<u64> {
    let mut bytes = 0u64;
    // SAFETY: the context is alive, so its device has a default pool; the attribute is a `u64`, where `bytes` is.
    unsafe {
        let pool = result::device::get_default_mem_pool(context.cu_device())?;
        let attribute = sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        result::mem_pool::get_attribute(pool, attribute, (&raw mut bytes).cast())?;
    }
    Ok(bytes)
}

/// Counts rounds in which a kernel did not start, because its stream shares a queue of the GPU with a stream that waits.
fn blocked(context: &Arc<CudaContext>, rounds: i32) -> Result<usize> {
    let module = context.load_module(compile_ptx(FLAG)?)?;
    let (wait, raise) = (module.load_function("await_flag")?, module.load_function("raise_flag")?);
    let one = LaunchConfig { grid_dim: (1, 1, 1), block_dim: (1, 1, 1), shared_mem_bytes: 0 };
    let mut blocked = 0;
    for _ in 0..rounds {
        let waiting = context.new_stream()?;
        let mut flag = waiting.alloc_zeros::<u32>(1)?;
        let mut looks = waiting.alloc_zeros::<u32>(1)?;
        waiting.synchronize()?;
        // SAFETY: the kernel has these parameters; both arrays have an element and outlive the kernel.
        unsafe { waiting.launch_builder(&wait).arg(&flag).arg(&mut looks).arg(&MOST).launch(one) }?;
        let ended = waiting.record_event(None)?;
        let parked = (0..PARKED).map(|_| context.new_stream()).collect::<Result<Vec<_>, _>>()?;
        parked.iter().try_for_each(|stream| stream.wait(&ended))?;
        let other = context.new_stream()?;
        // The flag is written while a kernel of another stream reads it: that is the point, so no event may order them.
        let address = device_address(&mut flag, &waiting);
        // SAFETY: as above; the address is that of the flag, which lives until this round has ended.
        unsafe { other.launch_builder(&raise).arg(&address).launch(one) }?;
        context.synchronize()?;
        blocked += usize::from(waiting.clone_dtoh(&looks)?[0] == MOST);
    }
    Ok(blocked)
}

/// The address of an array.
fn device_address(of: &mut CudaSlice<u32>, stream: &CudaStream) -> u64 {
    of.device_ptr_mut(stream).0
}
