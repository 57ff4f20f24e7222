//! The timing of one row.

use std::path::Path;
use std::time::Instant;

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, ProcessGroup, World};
use candle_nn::var_builder::{Shard, ShardedSafeTensors, ShardedVarBuilder};
use candle_shard::{DTensor, Placement, Spec, Weights, checkpoint};

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
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("weight.safetensors");
    let mesh = DeviceMesh::new(&ProcessGroup::simulated(RANK, args.world)?, &[("tp", args.world)])?;
    let mut rows = Vec::new();
    for &size in &args.shapes {
        let numbers: Vec<f32> = (0..size.rows * size.columns).map(|i| i as f32).collect();
        let weight = Tensor::from_vec(numbers, (size.rows, size.columns), &Device::Cpu)?;
        weight.save_safetensors(NAME, &file)?;
        let saved = folder.path().join("checkpoint");
        save(&weight, &saved)?;
        drop(weight);
        for dim in [0, 1] {
            begin(size, dim);
            rows.push(row([&file, &saved], size, dim, &mesh, args)?);
        }
    }
    Ok(Report { world: args.world, rows })
}

/// Saves the weight as a checkpoint, whose blocks have digests.
fn save(weight: &Tensor, folder: &Path) -> Result<()> {
    World::threads(1).run(|ctx| {
        let mesh = DeviceMesh::new(ctx.group(), &[("tp", 1)])?;
        let weight = DTensor::distribute(weight, &mesh, &[Placement::Replicate])?;
        checkpoint::save(folder, &mesh, &[(NAME.to_owned(), weight)])
    })?;
    Ok(())
}

fn row([file, saved]: [&Path; 2], size: Size, dim: usize, mesh: &DeviceMesh, args: &Args) -> Result<Row> {
    let shape = (size.rows, size.columns);
    let spec = Spec::new(mesh, &[Placement::Shard(dim)], shape, DType::F32)?;
    let (weights, saved) = (Weights::open(file)?, Weights::open(saved)?);
    let ours = || Ok(weights.read(NAME, &spec, &Device::Cpu)?.to_local().clone());
    let compared = || Ok(saved.read(NAME, &spec, &Device::Cpu)?.to_local().clone());
    let theirs = candle(file)?;
    let shard = Shard { dim, rank: RANK, world_size: args.world };
    let candle = || Ok(theirs.get_with_hints(shape, NAME, shard)?);
    ensure!(same(&ours()?, &candle()?)?, "the shards of {size} on dim {dim} differ from candle's");
    let bytes_read = weights.bytes_read();
    ensure!(
        same(&compared()?, &candle()?)?,
        "the shards of {size} on dim {dim} differ from those of a checkpoint"
    );
    let bytes_compared = saved.bytes_read();
    let (mut of_ours, mut of_compared, mut of_candle) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..args.rounds {
        of_ours.push(time_ms(ours)?);
        of_compared.push(time_ms(compared)?);
        of_candle.push(time_ms(candle)?);
    }
    let (ours_ms, compared_ms) = (median(&mut of_ours), median(&mut of_compared));
    let candle_ms = median(&mut of_candle);
    Ok(Row {
        rows: size.rows,
        columns: size.columns,
        dim,
        shard_bytes: size.rows * size.columns * ELEMENT_BYTES / args.world,
        bytes_read,
        ours_ms,
        bytes_compared,
        compared_ms,
        compared_gb_per_s: bytes_compared as f64 / 1e6 / compared_ms,
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
