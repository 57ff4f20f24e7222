//! Schedules run on threads, by stages that sleep for as long as they are said to compute.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{CpuStorage, CustomOp2, DType, Device, Layout, Shape, Tensor};
use candle_dist::{RankContext, World};
use candle_nn::{VarBuilder, VarMap};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::nn::LateGradients;
use candle_pipe::schedule::{Costs, Schedule, Span, Timeline};
use candle_pipe::{
    Ctx, In, Kwargs, Pipe, PipeBuilder, Reduction, Result, Runtime, SplitSpec, StepOptions, Value, stage_op,
};

/// Steps that are not measured: memory that is used for the first time costs more than what is measured.
const WARM_UP: usize = 2;

/// What the system's sleep may be late by: the rest of a wait is spent awake.
const LATE: Duration = Duration::from_micros(200);

/// What happens when the schedule runs, one rank a thread, where a time of 1 is `unit` seconds; in the unit of the costs.
///
/// # Errors
/// The runtime's.
pub fn measure(schedule: &Schedule, costs: &Costs, unit: f64) -> anyhow::Result<Timeline> {
    let spans = World::local(schedule.ranks().len()).run(|ctx| run(ctx, schedule, costs, unit))?;
    let scaled = |span: Span| Span { start: span.start / unit, end: span.end / unit, ..span };
    let ranks: Vec<Vec<Span>> = spans.into_iter().map(|spans| spans.into_iter().map(scaled).collect()).collect();
    Ok(Timeline { transfers: vec![vec![]; ranks.len()], ranks })
}

/// What this rank does, in seconds.
fn run(ctx: &RankContext, schedule: &Schedule, costs: &Costs, unit: f64) -> Result<Vec<Span>> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let runtime = Runtime::new(&pipe(schedule, costs, unit)?, schedule, ctx.group(), &vb, &Device::Cpu)?;
    let microbatches = schedule.microbatches();
    let x = Tensor::zeros(microbatches, DType::F32, &Device::Cpu)?;
    let batch = split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), microbatches, None, None)?;
    // All ranks end a step, and so begin the next, at once.
    for _ in 0..WARM_UP {
        runtime.forward_backward(&batch, &StepOptions::default())?;
    }
    Ok(runtime.forward_backward(&batch, &StepOptions::default())?.spans)
}

/// A chain of stages that sleep.
fn pipe(schedule: &Schedule, costs: &Costs, unit: f64) -> Result<Pipe<VarBuilder<'static>>> {
    let mut g = PipeBuilder::<VarBuilder<'static>>::new();
    let mut h = g.input("x", In::Arg);
    let seconds = |costs: &[f64], stage: usize| Duration::from_secs_f64(costs[stage] * unit);
    for stage in 0..schedule.stages() {
        let times = Arc::new(Times {
            forward: seconds(&costs.forward, stage),
            input: seconds(&costs.input, stage),
            weight: seconds(&costs.weight, stage),
        });
        let build = move |vb: &VarBuilder<'static>| {
            let (weight, times) = (vb.get((), "weight")?, times.clone());
            Ok(stage_op(move |xs: &[Value], _: &Ctx| {
                let op = Sleeps { times: times.clone(), late: LateGradients::of_stage() };
                Ok(vec![xs[0].tensor()?.apply_op2(&weight, op)?.into()])
            }))
        };
        if stage > 0 {
            g.split();
        }
        h = g.module(&format!("stages.{stage}"), build, [h]);
    }
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sum_all()?), [h], Reduction::Sum);
    g.finish(SplitSpec::declared())
}

/// For how long a stage computes.
struct Times {
    forward: Duration,
    input: Duration,
    weight: Duration,
}

/// The identity of `x`, which takes its time.
struct Sleeps {
    times: Arc<Times>,
    late: LateGradients,
}

impl CustomOp2 for Sleeps {
    fn name(&self) -> &'static str {
        "sleeps"
    }

    fn cpu_fwd(
        &self,
        x: &CpuStorage,
        layout: &Layout,
        _: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        sleep(self.times.forward);
        Ok((x.clone(), layout.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        weight: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>)> {
        sleep(self.times.input);
        let (time, like) = (self.times.weight, weight.detach());
        let late = self.late.give(weight, move || {
            sleep(time);
            like.zeros_like()
        })?;
        Ok((Some(grad.clone()), late))
    }
}

/// Waits for exactly so long.
fn sleep(time: Duration) {
    let until = Instant::now() + time;
    thread::sleep(time.saturating_sub(LATE));
    while Instant::now() < until {
        thread::yield_now();
    }
}
