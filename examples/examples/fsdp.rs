//! Fully sharded training: each of four ranks holds a quarter of the parameters and of the optimizer's state, and trains on its own
//! rows. They learn what one rank does.

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use candle_nn::ParamsAdamW;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{AdamW, Sequential, linear, seq};
use candle_shard::prelude::*;

fn block(vb: &MeshVarBuilder) -> candle_shard::Result<Sequential> {
    Ok(seq().add(linear(64, 256, vb.pp("up"))?).add_fn(DTensor::gelu).add(linear(256, 64, vb.pp("down"))?))
}

/// Returns the loss after some steps, and the number of parameters of this rank.
fn train(ctx: &RankContext) -> Result<(f32, usize)> {
    let mesh = ctx.mesh(&[("dp", ctx.world_size())])?;
    let vb = MeshVarBuilder::fresh(42, &mesh, Plan::none(), DType::F32, ctx.device())?;
    let vb = vb.fully_shard("dp", FullyShardOptions::default())?;
    let blocks = (0..4).map(|i| FullyShard::new(&vb.pp(i), block)).collect::<Result<Vec<_>, _>>()?;
    let mut optimizer = AdamW::new(&vb.finish()?, ParamsAdamW { lr: 0.003, ..ParamsAdamW::default() })?;
    let x = Tensor::arange(0f32, 640.0, ctx.device())?.sin()?.reshape((10, 64))?.on(&mesh, [("dp", Shard(0))])?;
    let forward = || blocks.iter().try_fold(x.clone(), |h, block| h.add(&block.forward(&h)?));
    let loss = || forward()?.sqr()?.mean_all();
    (0..10).try_for_each(|_| optimizer.backward_step(&loss()?))?;
    Ok((loss()?.to_scalar()?, optimizer.parameters().local_elem_count()))
}

fn main() -> Result<()> {
    let (one, four) = (World::threads(1).run(train)?[0], World::threads(4).run(train)?[0]);
    println!("loss {:.6} on four ranks, {:.6} on one; a rank holds {} of {} parameters", four.0, one.0, four.1, one.1);
    ensure!((one.0 - four.0).abs() < 1e-4 && 4 * four.1 == one.1, "the ranks do not learn what one rank does");
    Ok(())
}
