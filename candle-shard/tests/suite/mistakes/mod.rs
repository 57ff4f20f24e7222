//! Mistakes of programs, each with the error that names it: none is silent, and none hangs.
mod calls;
mod data;
mod files;
mod models;
mod tables;

use candle_core::{DType, Device::Cpu, Tensor};
use candle_dist::{DeviceMesh, RankContext};
use candle_shard::nn::MeshVarBuilder;
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Result};
use test_utils::mistakes::{all_say, of_the_world, on_all_ranks};

type Mistake = test_utils::mistakes::Mistake<candle_shard::Error>;

fn line(ctx: &RankContext, name: &str) -> Result<DeviceMesh> {
    Ok(ctx.mesh(&[(name, ctx.world_size())])?)
}

/// A tensor that each rank has drawn itself.
fn own(ctx: &RankContext, dims: &[usize]) -> Result<Tensor> {
    let count: usize = dims.iter().product();
    Ok(Tensor::arange(0f32, count as f32, &Cpu)?.affine(1.0, ctx.rank() as f64)?.reshape(dims)?)
}

/// A tensor that all ranks have alike.
fn same(dims: &[usize]) -> Result<Tensor> {
    let count: usize = dims.iter().product();
    Ok(Tensor::arange(0f32, count as f32, &Cpu)?.reshape(dims)?)
}

fn builder(mesh: &DeviceMesh, plan: Plan) -> Result<MeshVarBuilder> {
    MeshVarBuilder::fresh(42, mesh, plan, DType::F32, &Cpu)
}

#[track_caller]
fn everywhere(mesh: &DeviceMesh, x: &Tensor) -> Result<DTensor> {
    DTensor::distribute(x, mesh, &vec![candle_shard::Replicate; mesh.ndim()])
}
