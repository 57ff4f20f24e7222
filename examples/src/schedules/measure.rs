//! Runs schedules on threads, with stages that sleep for their costs.

use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use candle_core::{CpuStorage, CustomOp2, DType, Device, Layout, Shape, Tensor};
use candle_dist::{RankContext, World};
use candle_nn::{VarBuilder, VarMap};
use candle_pipe::microbatch::Microbatches;
use candle_pipe::nn::DeferredGradients;
use candle_pipe::schedule::{Costs, Schedule, Span, Timeline};
use candle_pipe::{
    Ctx, In, LossReduction, Pipe, PipeBuilder, Result, Runtime, SplitSpec, StepOptions, Value, stage_op,
};

/// Steps that are not measured: the first use of memory is slower.
const WARM_UP: usize = 2;

/// The longest delay of the system's sleep. A wait sleeps that much less, and polls for the rest.
const LATE: Duration = Duration::from_micros(200);

/// Runs the schedule with one thread per rank, where a time of 1 is `unit` seconds; returns times in the unit of the
/// costs.
///
/// # Errors
/// Those of the runtime.
pub fn measure(schedule: &Schedule, costs: &Costs, unit: f64) -> anyhow::Result<Timeline> {
    let spans = World::threads(schedule.ranks().len()).run(|ctx| run(ctx, schedule, costs, unit))?;
    let scaled = |span: Span| Span { start: span.start / unit, end: span.end / unit, ..span };
    let ranks: Vec<Vec<Span>> =
        spans.into_iter().map(|spans| spans.into_iter().map(scaled).collect()).collect();
    Ok(Timeline { transfers: vec![vec![]; ranks.len()], ranks })
}

/// Runs this rank; returns times in seconds.
fn run(ctx: &RankContext, schedule: &Schedule, costs: &Costs, unit: f64) -> Result<Vec<Span>> {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let runtime = Runtime::new(&pipe(schedule, costs, unit)?, schedule, ctx.group(), &vb, &Device::Cpu)?;
    let microbatches = schedule.microbatches();
    let x = Tensor::zeros(microbatches, DType::F32, &Device::Cpu)?;
    let batch = Microbatches::cut(microbatches, [x])?;
    // All ranks end a step together, so they also begin the next one together.
    for _ in 0..WARM_UP {
        runtime.forward_backward(&batch, &StepOptions::default())?;
    }
    Ok(runtime.forward_backward(&batch, &StepOptions::default())?.spans)
}

/// Builds a chain of stages that sleep.
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
                let op = Sleeps { times: times.clone(), deferred: DeferredGradients::of_stage() };
                Ok(vec![xs[0].tensor()?.apply_op2(&weight, op)?.into()])
            }))
        };
        if stage > 0 {
            g.split();
        }
        h = g.module(&format!("stages.{stage}"), build, [h]);
    }
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sum_all()?), [h], LossReduction::Sum);
    g.finish(SplitSpec::declared())
}

/// The times of a stage's passes.
struct Times {
    forward: Duration,
    input: Duration,
    weight: Duration,
}

/// The identity of `x`, with the times of the stage.
struct Sleeps {
    times: Arc<Times>,
    deferred: DeferredGradients,
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
        let deferred = self.deferred.give(weight, move || {
            sleep(time);
            like.zeros_like()
        })?;
        Ok((Some(grad.clone()), deferred))
    }
}

/// Waits for exactly this time.
fn sleep(time: Duration) {
    let until = Instant::now() + time;
    thread::sleep(time.saturating_sub(LATE));
    while Instant::now() < until {
        thread::yield_now();
    }
}
