//! The timing of one row.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, ProcessGroup};
use candle_nn::var_builder::{Shard, ShardedSafeTensors, ShardedVarBuilder};
use candle_shard::{Placement, Spec, Weights};

use super::args::{Args, ELEMENT_BYTES, Size};
use super::report::{Report, Row};
use crate::timing::median;

const NAME: &str = "weight";
/// The rank that loads: its shard is not at the beginning.
const RANK: usize = 1;

/// Measures both dims of every shape; calls `begin` before each row.
///
/// # Errors
/// If a file cannot be written or read, or the two results differ.
pub fn measure(args: &Args, begin: impl Fn(Size, usize)) -> Result<Report> {
    let file = Scratch(std::env::temp_dir().join(format!("bench-loading-{}.safetensors", std::process::id())));
    let mesh = DeviceMesh::new(&ProcessGroup::simulated(RANK, args.world)?, &[("tp", args.world)])?;
    let mut rows = Vec::new();
    for &size in &args.shapes {
        let numbers: Vec<f32> = (0..size.rows * size.columns).map(|i| i as f32).collect();
        Tensor::from_vec(numbers, (size.rows, size.columns), &Device::Cpu)?.save_safetensors(NAME, &file.0)?;
        for dim in [0, 1] {
            begin(size, dim);
            rows.push(row(&file.0, size, dim, &mesh, args)?);
        }
    }
    Ok(Report { world: args.world, rows })
}

fn row(file: &Path, size: Size, dim: usize, mesh: &DeviceMesh, args: &Args) -> Result<Row> {
    let shape = (size.rows, size.columns);
    let spec = Spec::new(mesh, &[Placement::Shard(dim)], shape, DType::F32)?;
    let weights = Weights::open(file)?;
    let ours = || Ok(weights.read(NAME, &spec, &Device::Cpu)?.to_local().clone());
    let theirs = candle(file)?;
    let shard = Shard { dim, rank: RANK, world_size: args.world };
    let candle = || Ok(theirs.get_with_hints(shape, NAME, shard)?);
    ensure!(same(&ours()?, &candle()?)?, "the shards of {size} on dim {dim} differ from candle's");
    let bytes_read = weights.bytes_read();
    let (mut of_ours, mut of_candle) = (Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        of_ours.push(time_ms(ours)?);
        of_candle.push(time_ms(candle)?);
    }
    let (ours_ms, candle_ms) = (median(&mut of_ours), median(&mut of_candle));
    Ok(Row {
        rows: size.rows,
        columns: size.columns,
        dim,
        shard_bytes: size.rows * size.columns * ELEMENT_BYTES / args.world,
        bytes_read,
        ours_ms,
        candle_ms,
        ratio: candle_ms / ours_ms,
    })
}

/// Opens the file with candle.
fn candle(file: &Path) -> Result<ShardedVarBuilder<'static>> {
    // SAFETY: nothing writes to the file while it is mapped. Its name contains the id of this process, which rewrites
    // it only after the last use of the map.
    Ok(unsafe { ShardedSafeTensors::var_builder(&[file], DType::F32, &Device::Cpu) }?)
}

fn same(a: &Tensor, b: &Tensor) -> Result<bool> {
    Ok(a.dims() == b.dims() && a.flatten_all()?.to_vec1::<f32>()? == b.flatten_all()?.to_vec1::<f32>()?)
}

/// Returns the time of one load in milliseconds.
fn time_ms(load: impl Fn() -> Result<Tensor>) -> Result<f64> {
    let start = Instant::now();
    let loaded = load()?;
    let elapsed = start.elapsed();
    drop(loaded);
    Ok(elapsed.as_secs_f64() * 1e3)
}

/// A file that is removed with this value.
struct Scratch(PathBuf);

impl Drop for Scratch {
    fn drop(&mut self) {
        // If it cannot be removed, the system keeps it.
        fs::remove_file(&self.0).ok();
    }
}
