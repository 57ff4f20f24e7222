//! The cost of the checks of a pipeline step: the comparison of a recomputed output with the first one, and the
//! agreement of the ranks before a step.
//!
//! Both sides of a comparison alternate in one process, so other load on the machine affects both.

use std::time::Instant;

use anyhow::Result;
use candle_core::{DType, Device, Tensor};
use candle_dist::bits::digest;
use candle_dist::{RankContext, World};
use candle_nn::{VarBuilder, VarMap};
use candle_pipe::microbatch::Microbatches;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{EqualCount, In, Keep, LossReduction, PipeBuilder, Runtime, StepOptions, nn};
use clap::Parser;
use examples::table::{number, table};
use examples::timing::median;

/// Measures the cost of the checks of a pipeline step
#[derive(Clone, Copy, Debug, Parser)]
struct Args {
    /// Width of the layers
    #[arg(long, default_value_t = 64)]
    width: usize,
    /// Layers of the model, on two ranks
    #[arg(long, default_value_t = 4)]
    layers: usize,
    /// Rows of a batch, in four microbatches
    #[arg(long, default_value_t = 256)]
    rows: usize,
    /// Times that each side runs, in turn
    #[arg(long, default_value_t = 21)]
    rounds: usize,
}

const MICROBATCHES: usize = 4;

/// Medians of one rank, in seconds.
struct Measured {
    /// A step with and without the comparison of second passes.
    checked: f64,
    unchecked: f64,
    /// The median of their ratios in each turn.
    ratio: f64,
    /// The agreement before a step, and the shortest exchange between the ranks.
    settled: f64,
    gathered: f64,
}

fn runtime(ctx: &RankContext, args: Args) -> candle_pipe::Result<(Runtime, Microbatches)> {
    let mut g = PipeBuilder::<VarBuilder<'static>>::new();
    let mut h = g.input("x", In::Arg);
    for layer in 0..args.layers {
        let (width, name) = (args.width, format!("layers.{layer}"));
        h = g.module(&name, move |vb| Ok(nn::linear(width, width, vb.clone())?), [h]);
        h = g.func(&format!("{name}.gelu"), |xs, _| Ok(xs[0].tensor()?.gelu_erf()?.into()), [h]);
    }
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [h], LossReduction::Mean);
    let pipe = g.finish(EqualCount(2))?;
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let schedule = ScheduleKind::OneFOneB.schedule(2, MICROBATCHES, 1)?;
    let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &vb, &Device::Cpu)?;
    let x = Tensor::ones((args.rows, args.width), DType::F32, &Device::Cpu)?;
    let batch = Microbatches::cut(MICROBATCHES, [x])?;
    Ok((runtime, batch))
}

/// Returns the time of a call, in seconds.
fn time<T>(f: impl FnOnce() -> candle_pipe::Result<T>) -> candle_pipe::Result<f64> {
    let began = Instant::now();
    f()?;
    Ok(began.elapsed().as_secs_f64())
}

fn measure(ctx: &RankContext, args: Args) -> candle_pipe::Result<Measured> {
    let (runtime, batch) = runtime(ctx, args)?;
    let step = |keep| time(|| runtime.forward_backward(&batch, &StepOptions::default().keep(keep)));
    let words = Tensor::zeros(8, DType::I64, &Device::Cpu)?;
    let [mut checked, mut unchecked, mut ratios, mut settled, mut gathered] = [const { Vec::new() }; 5];
    for _ in 0..3 {
        step(Keep::Inputs)?;
        step(Keep::InputsUnchecked)?;
    }
    for round in 0..args.rounds {
        // Each side is first in turn.
        let (with, without) = if round % 2 == 0 {
            let with = step(Keep::Inputs)?;
            (with, step(Keep::InputsUnchecked)?)
        } else {
            let without = step(Keep::InputsUnchecked)?;
            (step(Keep::Inputs)?, without)
        };
        checked.push(with);
        unchecked.push(without);
        ratios.push(with / without);
        // The work of a step before it computes: digests of the inputs, and one exchange.
        settled.push(time(|| {
            let inputs = batch.iter().flat_map(|(args, _)| args).map(|input| Ok(digest(input.tensor()?)?));
            inputs.collect::<candle_pipe::Result<Vec<u64>>>()?;
            Ok(ctx.group().all_gather(&words, 0)?)
        })?);
        gathered.push(time(|| Ok(ctx.group().all_gather(&words, 0)?))?);
    }
    let [checked, unchecked, ratio, settled, gathered] =
        [checked, unchecked, ratios, settled, gathered].map(|mut times| median(&mut times));
    Ok(Measured { checked, unchecked, ratio, settled, gathered })
}

fn main() -> Result<()> {
    let args = Args::parse();
    let ranks = World::threads(2).run(|ctx| measure(ctx, args))?;
    let mut shown = table(
        &["rank"],
        &["step, ms", "unchecked, ms", "ratio", "settling, µs", "all_gather of 8 numbers, µs", "settling, % of a step"],
    );
    for (rank, made) in ranks.iter().enumerate() {
        shown.add_row([
            number(rank),
            number(format_args!("{:.3}", made.checked * 1e3)),
            number(format_args!("{:.3}", made.unchecked * 1e3)),
            number(format_args!("{:.3}", made.ratio)),
            number(format_args!("{:.1}", made.settled * 1e6)),
            number(format_args!("{:.1}", made.gathered * 1e6)),
            number(format_args!("{:.2}", 100.0 * made.settled / made.unchecked)),
        ]);
    }
    let Args { width, layers, rows, rounds } = args;
    println!(
        "{layers} layers of width {width}, {rows} rows in {MICROBATCHES} microbatches on 2 ranks, medians of {rounds}\n{shown}"
    );
    Ok(())
}
