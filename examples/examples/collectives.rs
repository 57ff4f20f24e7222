//! Collectives of four ranks: blocking calls, a started call, and a failure that each rank gets as an error value.

use anyhow::{Result, ensure};
use candle_core::{Device, Tensor};
use candle_dist::{Cause, Collective, Error, RankContext, ReduceOp, World};

const RANKS: usize = 4;

/// Returns the tensor of a rank.
fn of_rank(rank: usize) -> candle_core::Result<Tensor> {
    Tensor::new(&[rank as f32, 1.0, -1.0, 10.0 * rank as f32], &Device::Cpu)
}

/// Returns a sum, all tensors in one, a piece of the sum, and a maximum that was exchanged while this rank computed.
fn communicate(ctx: &RankContext) -> Result<[Vec<f32>; 4]> {
    let (group, mine) = (ctx.group(), of_rank(ctx.rank())?);
    let started = group.call(Collective::AllReduce(ReduceOp::Max)).start(&mine)?;
    let square = mine.sqr()?; // needs no other rank
    let sum = group.all_reduce(&square, ReduceOp::Sum)?;
    let all = group.all_gather(&mine, 0)?;
    let piece = group.reduce_scatter(&mine, 0, ReduceOp::Sum)?;
    let largest = started.wait()?;
    Ok([sum.to_vec1()?, all.to_vec1()?, piece.to_vec1()?, largest.to_vec1()?])
}

/// Returns the error of each rank if the last one has a tensor of another shape.
fn disagree(ctx: &RankContext) -> Result<Option<Cause>> {
    let mine = of_rank(ctx.rank())?.narrow(0, 0, if ctx.rank() + 1 == RANKS { 3 } else { 4 })?;
    match ctx.group().all_reduce(&mine, ReduceOp::Sum) {
        Err(Error::Group(failure)) => {
            if ctx.rank() == 0 {
                println!("\na mismatch, as every rank is told of it:\n{failure}");
            }
            Ok(Some(failure.cause.clone()))
        }
        other => other.map(|_| None).map_err(Into::into),
    }
}

fn main() -> Result<()> {
    // The same on one device, which has the tensors of all ranks.
    let tensors = (0..RANKS).map(of_rank).collect::<candle_core::Result<Vec<_>>>()?;
    let stacked = Tensor::stack(&tensors, 0)?;
    let sum = stacked.sqr()?.sum(0)?.to_vec1::<f32>()?;
    let all = stacked.flatten_all()?.to_vec1::<f32>()?;
    let pieces = stacked.sum(0)?.to_vec1::<f32>()?;
    let largest = stacked.max(0)?.to_vec1::<f32>()?;

    let ranks = World::threads(RANKS).run(communicate)?;
    for (rank, got) in ranks.iter().enumerate() {
        let want = [sum.clone(), all.clone(), vec![pieces[rank]], largest.clone()];
        ensure!(*got == want, "rank {rank} got {got:?}, one device {want:?}");
    }
    let [sum, all, _, largest] = &ranks[0];
    println!("all_reduce of squares     {sum:?} on every rank");
    println!("all_gather                {all:?} on every rank");
    println!("reduce_scatter            {:?}, a piece a rank", ranks.iter().map(|got| got[2][0]).collect::<Vec<_>>());
    println!("a started all_reduce(.., Max) {largest:?} when waited for");

    let causes = World::threads(RANKS).run(disagree)?;
    let first = causes[0].clone();
    ensure!(matches!(first, Some(Cause::Mismatch { .. })), "{first:?} is no mismatch");
    ensure!(causes.iter().all(|cause| *cause == first), "ranks were told different things: {causes:?}");
    println!("\n{RANKS} ranks agree with one device, and on what went wrong");
    Ok(())
}
