//! The timing of a forward and a backward pass.

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_dist::{RankContext, World};
use candle_shard::nn::{MeshVarBuilder, MoE, MoEConfig, Mode, Scores};
use candle_shard::parallel::Plan;
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{DTensor, Shard};

use super::args::{Args, RoutingName};
use super::report::{Report, Row};
use crate::timing::{median, slowest};

/// The times on one rank, the rows that all ranks send, and those that the busiest one computes as a multiple of the mean.
type Times = (Vec<f64>, usize, f64);

/// How far the bias moves in a step, in the first half of the steps and in the second.
const RATES: [f64; 2] = [0.02, 0.005];

/// Measures each routing; `told` hears of it before.
///
/// # Errors
/// Those of the layer.
pub fn measure(args: &Args, mut told: impl FnMut(RoutingName)) -> Result<Report> {
    candle_dist::threads::settle(
        args.threads.unwrap_or_else(|| candle_dist::threads::default_per_rank(args.ranks)),
    );
    let mut rows = Vec::new();
    for &routing in args.routings() {
        told(routing);
        for balanced in [false, true].into_iter().filter(|balanced| !balanced || args.balance > 0) {
            let given = args.clone();
            let ranks: Vec<Times> =
                World::threads(args.ranks).run(move |ctx| on_rank(ctx, &given, routing, balanced))?;
            let times: Vec<&[f64]> = ranks.iter().map(|(times, ..)| &times[..]).collect();
            let (rows_sent, busiest) = ranks.first().map_or((0, 0.0), |(_, sent, busiest)| (*sent, *busiest));
            let ms = median(&mut slowest(&times));
            rows.push(Row { ranks: args.ranks, routing: routing.as_str(), balanced, ms, rows_sent, busiest });
        }
    }
    Ok(Report { rows })
}

/// Returns tokens whose first columns are logits: Gumbel noise, so that the largest is drawn with the routing's
/// frequencies.
fn tokens(args: &Args, routing: RoutingName) -> candle_core::Result<Tensor> {
    let even = |lo| Distribution::Uniform { lo, up: 1.0 };
    let draw = |name: &str, lo, columns| {
        sample_full(Stream::new(0, name), even(lo), &[args.tokens, columns], DType::F32, &Device::Cpu)
    };
    let noise = draw("logits", 1e-6, args.experts)?.log()?.neg()?.log()?.neg()?;
    let favor =
        Tensor::from_iter((0..args.experts).map(|expert| routing.favor(expert) as f32), &Device::Cpu)?;
    let logits = noise.broadcast_add(&favor)?;
    match args.width - args.experts {
        0 => Ok(logits),
        rest => Tensor::cat(&[logits, draw("rest", -1.0, rest)?], 1),
    }
}

fn on_rank(
    ctx: &RankContext,
    args: &Args,
    routing: RoutingName,
    balanced: bool,
) -> candle_shard::Result<Times> {
    let mesh = ctx.mesh(&[("ep", args.ranks)])?;
    let vb = MeshVarBuilder::fresh(0, &mesh, Plan::new("ep"), DType::F32, &Device::Cpu)?;
    let config =
        MoEConfig::new(args.width, args.hidden, args.experts, args.top_k).normalize(true).expert_axis("ep");
    // A bias moves scores that do not depend on those of other experts.
    let config = if balanced { config.scores(Scores::Sigmoid).bias(true) } else { config };
    let layer = MoE::new(config, &vb)?;
    let parameters = vb.finish()?;
    // The router reads the first columns.
    let ones = Tensor::eye(args.experts, DType::F32, &Device::Cpu)?.pad_with_zeros(
        1,
        0,
        args.width - args.experts,
    )?;
    for parameter in parameters.iter().filter(|parameter| parameter.name == "router.weight") {
        parameter.var.set(&ones)?;
    }
    let (x, _) = DTensor::distribute(&tokens(args, routing)?, &mesh, &[Shard(0)])?.to_var()?;
    for step in (0..args.balance).filter(|_| balanced) {
        layer.forward(&x, Mode::Train { step: step as u64 })?;
        layer.update_bias(RATES[usize::from(2 * step >= args.balance)], None)?;
    }
    let mut made = Times::default();
    for round in 0..=args.rounds {
        ctx.group().barrier()?;
        let began = Instant::now();
        let output = layer.forward(&x, Mode::Train { step: round as u64 })?;
        parameters.backward(&output.output.sum_all()?)?;
        let time = began.elapsed();
        if round > 0 {
            made.0.push(time.as_secs_f64() * 1e3);
            let load = output.load;
            let (most, all) =
                (load.ranks.iter().max().copied().unwrap_or(0), load.ranks.iter().sum::<usize>());
            (made.1, made.2) = (load.sent, (most * load.ranks.len()) as f64 / all.max(1) as f64);
        }
    }
    Ok(made)
}
