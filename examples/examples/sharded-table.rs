//! A table sharded over two ranks, looked up and trained by rows. The bytes sent grow with the ids, not with the table.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{RankContext, World, comm};
use candle_shard::random::Stream;
use candle_shard::sparse::{ParamsAdagrad, SparseAdagrad};
use candle_shard::{ChunkShardingSpec, EmbeddingBagOptions, ShardedTensor};

const RANKS: usize = 2;
const ROWS: usize = 50_000;
const WIDTH: usize = 16;
/// Bags of each rank, and ids of each bag.
const BAGS: [usize; 2] = [32, 4];
const STEPS: usize = 3;
const ADAGRAD: ParamsAdagrad =
    ParamsAdagrad { lr: 0.1, lr_decay: 0.0, weight_decay: 0.0, initial_accumulator_value: 0.1, eps: 1e-10 };

/// Returns the ids of a rank's bags; some ids are in several bags.
fn ids(rank: usize, step: usize) -> candle_core::Result<Tensor> {
    let [bags, each] = BAGS;
    let id = |i: usize| ((i * i * 7919 + rank * 31 + step * 104_729) % ROWS) as u32;
    Tensor::from_vec((0..bags * each).map(id).collect(), (bags, each), &Device::Cpu)
}

/// The whole table, before and after training.
fn on_ranks(ctx: &RankContext) -> Result<[Tensor; 2]> {
    let spec = ChunkShardingSpec::on_ranks(0, 0..RANKS)?;
    let stream = Stream::new(42, "table");
    let start = ShardedTensor::randn(0f32, 1., &spec, (ROWS, WIDTH), &Device::Cpu, ctx.group(), stream)?;
    let (table, rows) = start.to_row_vars()?;
    let mut optimizer = SparseAdagrad::new(rows.clone(), ADAGRAD)?;
    let before = table.gather_all()?;
    for step in 0..STEPS {
        let (found, forward) =
            comm::record(|| table.embedding_bag(&ids(ctx.rank(), step)?, None, None, &EmbeddingBagOptions::default()));
        let loss = found?.sqr()?.sum_all()?;
        let (passed, backward) = comm::record(|| loss.backward());
        passed?;
        let mut touched = 0;
        for row in &rows {
            touched += row.grad()?.map_or(0, |grad| grad.rows().len());
        }
        optimizer.step()?;
        if ctx.rank() == 0 {
            let (there, back) = (forward.total_bytes(), backward.total_bytes());
            println!("step {step}: {there} B to look up, {back} B of gradients, {touched} rows here to update");
            ensure!(
                (there + back) * 20 < ROWS * WIDTH * 4,
                "{there} and {back} bytes are not a small part of the table"
            );
        }
    }
    Ok([before, table.gather_all()?])
}

/// Trains the same table with candle's ops alone, whose gradient is as large as the table.
fn on_one_device(before: &Tensor) -> Result<Tensor> {
    let table = Var::from_tensor(&before.detach())?;
    let mut squares = (table.ones_like()? * ADAGRAD.initial_accumulator_value)?;
    for step in 0..STEPS {
        let ids = (0..RANKS).map(|rank| ids(rank, step)?.flatten_all()).collect::<candle_core::Result<Vec<_>>>()?;
        let found = table.index_select(&Tensor::cat(&ids, 0)?, 0)?.reshape((RANKS * BAGS[0], BAGS[1], WIDTH))?;
        let grads = found.mean(1)?.sqr()?.sum_all()?.backward()?;
        let grad = grads.get(&table).map_or_else(|| table.zeros_like(), |grad| Ok(grad.detach()))?;
        squares = (squares + grad.sqr()?)?;
        table.set(&(table.as_tensor() - ((grad * ADAGRAD.lr)? / (squares.sqrt()? + ADAGRAD.eps)?)?)?.detach())?;
    }
    Ok(table.as_detached_tensor())
}

fn main() -> Result<()> {
    println!("a table of {} B, half of it on each of {RANKS} ranks", ROWS * WIDTH * DType::F32.size_in_bytes());
    for [before, after] in World::threads(RANKS).run(on_ranks)? {
        let want = on_one_device(&before)?;
        let off = (&after - &want)?.abs()?.max_all()?.to_scalar::<f32>()?;
        ensure!(off < 1e-5, "the trained table is off by {off:e}");
        let moved = (&after - &before)?.abs()?.max(1)?.ne(0f32)?.to_dtype(DType::F32)?.sum_all()?.to_scalar::<f32>()?;
        ensure!(moved > 0.0, "nothing was learned");
        println!("{moved} of {ROWS} rows have changed, and the table equals that of one device");
    }
    Ok(())
}
