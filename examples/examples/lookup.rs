//! A sharded table of embeddings in front of a tensor-parallel layer: each rank of a 2 × 2 mesh holds a quarter of the rows, and
//! only the rows that a step looks up are sent and updated. The ranks learn what one rank does.

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use candle_nn::ParamsAdamW;
use candle_shard::nn::{AdamW, linear, seq};
use candle_shard::prelude::*;
use candle_shard::random::Stream;
use candle_shard::sparse::{ParamsAdagrad, SparseAdagrad};
use candle_shard::{ChunkShardingSpec, EmbeddingOptions, ShardedTensor};

/// Returns the loss after some steps on a mesh of `dp` × `tp` ranks.
fn train(ctx: &RankContext, dp: usize, tp: usize) -> Result<f32> {
    let mesh = ctx.mesh(&[("dp", dp), ("tp", tp)])?;
    let (spec, stream) = (ChunkShardingSpec::on_ranks(0, 0..ctx.world_size())?, Stream::new(42, "table"));
    let table = ShardedTensor::randn(0f32, 1.0, &spec, (1001, 16), ctx.device(), ctx.group(), stream)?;
    let (table, rows) = table.to_row_vars()?;
    let plan = Plan::new("tp").with("up", ColwiseParallel::default()).with("down", RowwiseParallel::default());
    let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, ctx.device())?;
    let model = seq().add(linear(16, 64, vb.pp("up"))?).add_fn(DTensor::gelu).add(linear(64, 1, vb.pp("down"))?);
    let mut by_rows = SparseAdagrad::new(rows, ParamsAdagrad { lr: 0.1, ..ParamsAdagrad::default() })?;
    let mut optimizer = AdamW::new(&vb.finish()?, ParamsAdamW { lr: 0.003, ..ParamsAdamW::default() })?;
    let ids = Tensor::from_iter((0..40u32).map(|i| i * i * 7919 % 1001), ctx.device())?;
    let ids = ids.reshape((10, 4))?.on(&mesh, [("dp", Shard(0))])?;
    let found = || table.lookup(&ids, &EmbeddingOptions::default())?.mean(1);
    let loss = || model.forward(&found()?)?.affine(1.0, -1.0)?.sqr()?.mean_all();
    for _ in 0..10 {
        optimizer.backward_step(&loss()?)?;
        by_rows.step()?;
    }
    Ok(loss()?.to_scalar()?)
}

fn main() -> Result<()> {
    let one = World::threads(1).run(|ctx| train(ctx, 1, 1))?[0];
    let four = World::threads(4).run(|ctx| train(ctx, 2, 2))?[0];
    println!("loss {four:.6} on four ranks, {one:.6} on one");
    ensure!((one - four).abs() < 1e-5 && four < 0.1, "the ranks do not learn what one rank does");
    Ok(())
}
