//! A schedule from text: validated when it is read, simulated, drawn, run, and compared with one device.

use std::collections::HashMap;

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{RankContext, World};
use candle_nn::VarBuilder;
use candle_pipe::microbatch::Microbatches;
use candle_pipe::schedule::{Costs, Edges, Schedule, ScheduleKind, draw};
use candle_pipe::{In, LocalPipe, LossReduction, Pipe, PipeBuilder, Runtime, SplitSpec, StepOptions, StepResult, nn};

/// One line per rank. Rank 1 defers weight gradients (`W`), so that rank 0 gets input gradients (`I`) sooner.
const TEXT: &str = "\
0F0,0F1,0F2,0I0,0W0,0I1,0W1,0I2,0W2
,1F0,1I0,1F1,1I1,1F2,1I2,1W0,1W1,1W2
";

/// Simulates a schedule whose `F`, `I` and `W` take equally long, and draws it.
fn simulate(name: &str, schedule: &Schedule) -> Result<f64> {
    let costs = Costs::per_rank(schedule.stage_ranks(), 1.0, 1.0, 1.0);
    let timeline = schedule.simulate(&Edges::chain(schedule.stages()), &costs)?;
    let (makespan, idle) = (timeline.makespan(), 100.0 * timeline.bubble_step());
    println!("{name} takes {makespan}, {idle:.0}% of it idle, and holds {:?}:", timeline.peak_activations());
    println!("{}", draw::text(&timeline));
    Ok(makespan)
}

fn model() -> candle_pipe::Result<Pipe<VarBuilder<'static>>> {
    let mut g = PipeBuilder::new();
    let x = g.input("x", In::Arg);
    let h = g.module("up", |vb: &VarBuilder<'static>| Ok(nn::linear_no_bias(2, 2, vb.clone())?), [x]);
    g.split();
    let y = g.module("down", |vb: &VarBuilder<'static>| Ok(nn::linear_no_bias(2, 2, vb.clone())?), [h]);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.tanh()?.mean_all()?), [y], LossReduction::Mean);
    g.finish(SplitSpec::declared())
}

/// Creates the variables of both layers; each call returns new ones with the same values.
fn variables() -> Result<VarBuilder<'static>> {
    let var = |value: f64| {
        candle_core::Result::Ok(Var::new(&[[value, 0.3], [0.1, -value]], &Device::Cpu)?.as_tensor().clone())
    };
    let vars = HashMap::from([("up.weight".to_string(), var(0.5)?), ("down.weight".to_string(), var(0.7)?)]);
    Ok(VarBuilder::from_tensors(vars, DType::F64, &Device::Cpu))
}

/// Returns the gradients of parameters by name.
fn by_name<'a>(
    step: &StepResult,
    of: impl Iterator<Item = (&'a String, &'a Tensor)>,
) -> Result<HashMap<String, Tensor>> {
    of.map(|(name, p)| Ok((name.clone(), step.grads.get(p).context("a gradient")?.clone()))).collect()
}

fn on_ranks(ctx: &RankContext, schedule: &Schedule, x: &Tensor) -> Result<HashMap<String, Tensor>> {
    let runtime = Runtime::new(&model()?, schedule, ctx.group(), &variables()?, &Device::Cpu)?;
    let batch = Microbatches::cut(schedule.microbatches(), [x])?;
    let step = runtime.forward_backward(&batch, &StepOptions::default())?.step;
    by_name(&step, runtime.stages().flat_map(|stage| stage.parameters()))
}

fn main() -> Result<()> {
    let own = Schedule::from_csv(TEXT)?;
    let known = ScheduleKind::OneFOneB.schedule(2, own.microbatches(), 1)?;
    let (own_time, known_time) = (simulate("this schedule", &own)?, simulate("1f1b", &known)?);
    ensure!(own_time < known_time, "{own_time} is no less than {known_time}");

    let broken = TEXT.replace("1F0,1I0", "1I0,1F0");
    let refused = Schedule::from_csv(&broken).err().context("a broken schedule was accepted")?;
    println!("an invalid one is refused: {refused}\n");

    let x = Tensor::arange(0f64, 14., &Device::Cpu)?.affine(0.1, -0.5)?.reshape((7, 2))?;
    let local = LocalPipe::new(&model()?, &variables()?, &Device::Cpu)?;
    let whole = Microbatches::cut(1, [&x])?;
    let step = local.forward_backward(&whole, &StepOptions::default())?;
    let want = by_name(&step, local.stages().iter().flat_map(|stage| stage.parameters()))?;
    for (name, got) in World::threads(2).run(|ctx| on_ranks(ctx, &own, &x))?.iter().flatten() {
        let off = (got - &want[name])?.abs()?.max_all()?.to_scalar::<f64>()?;
        ensure!(off < 1e-12, "the gradient of {name} is off by {off:e}");
        println!("the gradient of {name} is that of one device");
    }
    Ok(())
}
