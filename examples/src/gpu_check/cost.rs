//! The cost of collectives, compared with copies of the GPU's memory.

use std::fmt::Write;
use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_dist::{ProcessGroup, RankContext, ReduceOp};

use super::Ranks;
use crate::timing::median;

const SIZES: [usize; 3] = [4 << 10, 1 << 20, 64 << 20];
const ROUNDS: usize = 20;
const CALLS: usize = 10;

type Op = fn(&ProcessGroup, &Tensor) -> candle_dist::Result<Tensor>;

const OPS: [(&str, Op); 6] = [
    ("copy", |_, x| Ok(x.force_contiguous()?)),
    ("all_reduce", |g, x| g.all_reduce(x, ReduceOp::Sum)),
    ("all_gather", |g, x| g.all_gather(x, 0)),
    ("reduce_scatter", |g, x| g.reduce_scatter(x, 0, ReduceOp::Sum)),
    ("all_to_all", |g, x| g.all_to_all(x, 0, 1)),
    ("broadcast", |g, x| g.broadcast(x, 0)),
];

/// Returns a line for each size: microseconds per call, the median of the slowest rank.
pub(super) fn check(ranks: &Ranks) -> Result<String> {
    let rounds = if ranks.small { 1 } else { ROUNDS };
    let sizes = if ranks.small { &SIZES[..1] } else { &SIZES[..] };
    let times =
        ranks.run(|ctx| sizes.iter().map(|&bytes| times(ctx, bytes, rounds)).collect::<Result<Vec<_>>>())?;
    let mut lines = format!("µs a call, median of {rounds} rounds of {CALLS} calls");
    for (i, bytes) in sizes.iter().enumerate() {
        write!(lines, "\n  {:>6} KiB:", bytes >> 10)?;
        for (j, (name, _)) in OPS.iter().enumerate() {
            let slowest = times.iter().map(|of_rank| of_rank[i][j]).fold(0.0, f64::max);
            write!(lines, " {name} {slowest:.1}")?;
        }
    }
    Ok(lines)
}

fn times(ctx: &RankContext, bytes: usize, rounds: usize) -> Result<Vec<f64>> {
    let x = Tensor::ones((bytes / 64, 16), DType::F32, ctx.device())?;
    OPS.iter().map(|(_, op)| time(ctx.group(), ctx.device(), &x, *op, rounds)).collect()
}

fn time(group: &ProcessGroup, device: &Device, x: &Tensor, op: Op, rounds: usize) -> Result<f64> {
    let mut times = Vec::with_capacity(rounds);
    for _ in 0..rounds {
        device.synchronize()?;
        group.barrier()?;
        let start = Instant::now();
        (0..CALLS).try_for_each(|_| op(group, x).map(drop))?;
        device.synchronize()?;
        times.push(start.elapsed().as_secs_f64() * 1e6 / CALLS as f64);
    }
    Ok(median(&mut times))
}
