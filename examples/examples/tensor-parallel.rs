//! Tensor parallelism: an MLP whose first layer is cut by columns and whose second layer is cut by rows. Two ranks train it as one
//! does.

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use candle_nn::ParamsAdamW;
use candle_shard::nn::{AdamW, linear, seq};
use candle_shard::prelude::*;

/// Returns the loss after some steps.
fn train(ctx: &RankContext) -> Result<f32> {
    let plan = Plan::new("tp").with("up", ColwiseParallel::default()).with("down", RowwiseParallel::default());
    let vb = MeshVarBuilder::fresh(42, &ctx.mesh(&[("tp", ctx.world_size())])?, plan, DType::F32, ctx.device())?;
    let model = seq().add(linear(8, 64, vb.pp("up"))?).add_fn(DTensor::gelu).add(linear(64, 8, vb.pp("down"))?);
    let mut optimizer = AdamW::new(&vb.finish()?, ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() })?;
    let x = Tensor::arange(0f32, 128.0, ctx.device())?.sin()?.reshape((16, 8))?.on(vb.mesh(), [])?;
    let loss = || model.forward(&x)?.sub(&x)?.sqr()?.mean_all();
    (0..20).try_for_each(|_| optimizer.backward_step(&loss()?))?;
    Ok(loss()?.to_scalar()?)
}

fn main() -> Result<()> {
    let (one, two) = (World::threads(1).run(train)?[0], World::threads(2).run(train)?[0]);
    println!("loss {two:.6} on two ranks, {one:.6} on one");
    ensure!((one - two).abs() < 1e-5 && two < 0.1, "the ranks do not learn what one rank does");
    Ok(())
}
