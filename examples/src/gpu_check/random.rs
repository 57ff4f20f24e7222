//! Random numbers that the GPU draws, compared bit by bit with those of the host.

use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_shard::random::{Distribution, Stream, sample};

use super::Ranks;

const SHAPE: [usize; 2] = [1024, 2048];
const SMALL: [usize; 2] = [32, 64];
const DISTRIBUTIONS: [Distribution; 3] = [
    Distribution::Uniform { lo: -0.7, up: 2.1 },
    Distribution::Normal { mean: 0.3, stdev: 1.7 },
    Distribution::Bernoulli { p: 0.3 },
];

/// Returns the time of a draw on the GPU and on the host.
pub(super) fn check(ranks: &Ranks) -> Result<String> {
    let shape = if ranks.small { SMALL } else { SHAPE };
    let [rows, columns] = shape;
    let mut equal = 0;
    let [mut on_gpu, mut on_host] = [0.0, 0.0];
    for device in ranks.devices() {
        for dist in DISTRIBUTIONS {
            for dtype in [DType::F32, DType::F64, DType::BF16, DType::F16] {
                for block in [[0..rows, 0..columns], [5..rows - 24, 10..columns - 1]] {
                    let draw = |device: &Device| -> Result<(Tensor, f64)> {
                        let start = Instant::now();
                        let drawn = sample(Stream::new(7, "gpu-check"), dist, &shape, &block, dtype, device)?;
                        device.synchronize()?;
                        Ok((drawn, start.elapsed().as_secs_f64() * 1e6))
                    };
                    draw(device)?; // compiles and loads the kernel
                    let ((gpu, of_gpu), (host, of_host)) = (draw(device)?, draw(&Device::Cpu)?);
                    let unlike = gpu.to_device(&Device::Cpu)?.ne(&host)?.to_dtype(DType::F64)?.sum_all()?;
                    let unlike = unlike.to_scalar::<f64>()?;
                    ensure!(unlike == 0.0, "{unlike} elements of {block:?} of {dist:?} in {dtype:?} differ");
                    equal += host.elem_count();
                    on_gpu += of_gpu;
                    on_host += of_host;
                }
            }
        }
    }
    Ok(format!("{equal} numbers alike, drawn in {on_gpu:.0} µs on the GPU and {on_host:.0} µs on the host"))
}
