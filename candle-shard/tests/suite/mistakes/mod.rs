//! Mistakes of programs, each with the error that names it: none is silent, and none hangs.
mod calls;
mod data;
mod files;
mod models;
mod tables;

use candle_core::{DType, Device::Cpu, Tensor};
use candle_dist::{DeviceMesh, RankContext, World};
use candle_shard::nn::ShardedVarBuilder;
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Result};
use std::sync::Mutex;

/// The name of a mistake, the parts of the text that names it, and the program with it.
type Mistake = (&'static str, &'static [&'static str], fn(&RankContext) -> Result<()>);

/// Runs a program on `ranks` ranks, all of which must get an error with these parts.
fn all_say(ranks: usize, name: &str, parts: &[&str], program: impl Fn(&RankContext) -> Result<()> + Sync) {
    let texts = Mutex::new(vec![None; ranks]);
    let ran = World::local(ranks).run(|ctx| -> Result<()> {
        let ended = program(ctx);
        texts.lock().unwrap()[ctx.rank()] = ended.as_ref().err().map(ToString::to_string);
        ended
    });
    assert!(ran.is_err(), "{name} is silent");
    for (rank, text) in texts.into_inner().unwrap().into_iter().enumerate() {
        let text = text.unwrap_or_else(|| panic!("{name} is silent on rank {rank}"));
        parts.iter().for_each(|part| assert!(text.contains(part), "{name}, rank {rank}, {part:?}: {text}"));
    }
}

/// Runs each program on `ranks` ranks, all of which must get an error with its parts.
fn on_all_ranks(ranks: usize, mistakes: &[Mistake]) {
    mistakes.iter().for_each(|(name, parts, program)| all_say(ranks, name, parts, program));
}

/// Runs each program on 2 ranks, of which one may end well: the error of the world must have these parts.
fn of_the_world(mistakes: &[Mistake]) {
    for (name, parts, program) in mistakes {
        let error = World::local(2).run(program).err().unwrap_or_else(|| panic!("{name} is silent"));
        let text = error.to_string();
        parts.iter().for_each(|part| assert!(text.contains(part), "{name}, {part:?}: {text}"));
    }
}

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

fn builder(mesh: &DeviceMesh, plan: Plan) -> Result<ShardedVarBuilder> {
    ShardedVarBuilder::fresh(42, mesh, plan, DType::F32, &Cpu)
}

#[track_caller]
fn everywhere(mesh: &DeviceMesh, x: &Tensor) -> Result<DTensor> {
    DTensor::distribute(x, mesh, &vec![candle_shard::Replicate; mesh.ndim()])
}
