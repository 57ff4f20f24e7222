//! Fully sharded training of an MLP on 2 × 2 ranks, compared with one rank: equal losses, a quarter of the parameters.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_dist::{Op, RankContext, World, comm};
use candle_nn::ParamsAdamW;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{AdamW, Linear, ShardedVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate, Shard};

const WIDTH: usize = 64;
const LAYERS: usize = 4;

struct Block {
    up: Linear,
    down: Linear,
}

impl Block {
    fn new(vb: &ShardedVarBuilder) -> candle_shard::Result<Self> {
        let up = Linear::new(WIDTH, 4 * WIDTH, true, &vb.pp("up"))?;
        Ok(Self { up, down: Linear::new(4 * WIDTH, WIDTH, true, &vb.pp("down"))? })
    }

    fn forward(&self, x: &DTensor) -> candle_shard::Result<DTensor> {
        x.add(&self.down.forward(&self.up.forward(x)?.gelu()?)?)
    }
}

/// Returns the losses of some steps on a mesh of `dp` × `tp` ranks, and the number of parameters of this rank.
fn train(ctx: &RankContext, dp: usize, tp: usize) -> Result<(Vec<f32>, usize)> {
    let mesh = ctx.mesh(&[("dp", dp), ("tp", tp)])?;
    let plan = Plan::new("tp")
        .with("*.up", ColwiseParallel::default())
        .with("*.down", RowwiseParallel::default().output(Replicate));
    let vb = ShardedVarBuilder::fresh(1, &mesh, plan, DType::F32, &Device::Cpu)?;
    let vb = vb.fully_shard("dp", FullyShardOptions::default())?;
    let block = |i: usize| FullyShard::new(&vb.pp(i), Block::new);
    let blocks = (0..LAYERS).map(block).collect::<candle_shard::Result<Vec<_>>>()?;
    let parameters = vb.finish()?;
    let mut optimizer = AdamW::new(&parameters, ParamsAdamW { lr: 3e-3, ..ParamsAdamW::default() })?;

    let batch = Tensor::arange(0f32, (8 * WIDTH) as f32, &Device::Cpu)?.sin()?.reshape((8, WIDTH))?;
    let x = DTensor::distribute(&batch, &mesh, &[Shard(0), Replicate])?;
    let mut losses = Vec::new();
    for step in 0..10 {
        let (loss, counts) = comm::record(|| -> Result<DTensor> {
            let y = blocks.iter().try_fold(x.clone(), |x, block| block.run(|block| block.forward(&x)))?;
            let loss = y.sqr()?.mean_all()?;
            optimizer.step(&parameters.backward(&loss)?)?;
            Ok(loss)
        });
        losses.push(loss?.to_scalar::<f32>()?);
        if step == 0 && ctx.rank() == 0 && dp > 1 {
            let [gathers, scatters] = [Op::AllGather, Op::ReduceScatter].map(|op| counts.get(op).count);
            println!("a step of {LAYERS} units: {gathers} all_gathers, {scatters} reduce_scatters over the replicas");
        }
    }
    Ok((losses, parameters.local_elem_count()))
}

fn main() -> Result<()> {
    let (alone, all) = World::local(1).run(|ctx| train(ctx, 1, 1))?.swap_remove(0);
    let (losses, held) = World::local(4).run(|ctx| train(ctx, 2, 2))?.swap_remove(0);
    println!("loss {:.4} to {:.4}; a rank holds {held} of {all} parameters", losses[0], losses[9]);
    for (loss, want) in losses.iter().zip(&alone) {
        ensure!((loss - want).abs() < 1e-4 * want.max(1.0), "{losses:?} on 4 ranks, {alone:?} on one");
    }
    println!("the losses are those of one rank");
    Ok(())
}
