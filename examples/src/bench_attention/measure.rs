//! The timing of both phases.

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device};
use candle_dist::{RankContext, World, comm};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{Attention, Shard, TokenOrder};

use super::args::Args;
use super::report::{Report, Row};
use crate::timing::{median, slowest};

const PHASES: [&str; 2] = ["forward", "backward"];

/// The times of each phase on one rank, and its bytes.
type Phases = [(Vec<f64>, usize); 2];

/// Measures both phases.
///
/// # Errors
/// Those of attention.
pub fn measure(args: &Args) -> Result<Report> {
    let threads = candle_dist::threads::settle(
        args.threads.unwrap_or_else(|| candle_dist::threads::default_per_rank(args.ranks)),
    );
    let given = args.clone();
    let ranks: Vec<Phases> = World::threads(args.ranks).run(move |ctx| on_rank(ctx, &given))?;
    let row = |(i, phase): (usize, &'static str)| {
        let times: Vec<&[f64]> = ranks.iter().map(|phases| &phases[i].0[..]).collect();
        let bytes = ranks.iter().map(|phases| phases[i].1).max().unwrap_or(0);
        Row {
            way: args.way.as_str(),
            length: args.length,
            phase,
            threads,
            ms: median(&mut slowest(&times)),
            bytes,
        }
    };
    Ok(Report { rows: PHASES.into_iter().enumerate().map(row).collect() })
}

fn on_rank(ctx: &RankContext, args: &Args) -> candle_shard::Result<Phases> {
    let mesh = ctx.mesh(&[("cp", args.ranks)])?;
    let order = TokenOrder::zigzag(args.length, args.ranks);
    let put = |name: &str, heads: usize| {
        let even = Distribution::Uniform { lo: -1.0, up: 1.0 };
        let shape = [1, args.length, heads, args.dim];
        let whole = sample_full(Stream::new(0, name), even, &shape, DType::F32, &Device::Cpu)?
            .to_dtype(args.dtype)?;
        order.distribute(&whole, 1, &mesh, &[Shard(1)])?.to_var()
    };
    let [(q, _), (k, _), (v, _)] =
        [put("query", args.heads)?, put("key", args.kv_heads)?, put("value", args.kv_heads)?];
    let way = Some(args.way.way());
    let attention = Attention::default().causal(true).order(order).way(way).window(args.window);
    let mut phases = Phases::default();
    for round in 0..=args.rounds {
        ctx.group().barrier()?;
        let began = Instant::now();
        let (out, sent) = comm::record(|| attention.of(&q, &k, &v));
        let (loss, forward) = (out?.sum_all()?, began.elapsed());
        ctx.group().barrier()?;
        let began = Instant::now();
        let (grads, sent_back) = comm::record(|| loss.backward());
        grads?;
        let backward = began.elapsed();
        if round > 0 {
            for (phase, (time, sent)) in phases.iter_mut().zip([(forward, sent), (backward, sent_back)]) {
                phase.0.push(time.as_secs_f64() * 1e3);
                phase.1 = sent.total_bytes();
            }
        }
    }
    Ok(phases)
}
