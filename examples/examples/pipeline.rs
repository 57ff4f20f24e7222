//! A pipeline: a declared model is cut into two stages, which run under 1F1B on two ranks. Gradients match one device.

use std::collections::{BTreeMap, HashMap};

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{RankContext, World, comm};
use candle_nn::{Module, VarBuilder};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{In, Kwargs, Pipe, PipeBuilder, Reduction, Runtime, SplitPoint, SplitSpec, StepOptions, nn};
use candle_shard::random::{Distribution, Stream, sample_full};

const RANKS: usize = 2;
const MICROBATCHES: usize = 4;
const PARAMETERS: [(&str, &[usize]); 4] =
    [("up.weight", &[32, 8]), ("up.bias", &[32]), ("down.weight", &[8, 32]), ("down.bias", &[8])];

type Vb = VarBuilder<'static>;

/// Returns normal numbers that depend on a name only.
fn numbers(name: &str, dims: &[usize]) -> Result<Tensor> {
    let normal = Distribution::Normal { mean: 0.0, stdev: 0.5 };
    Ok(sample_full(Stream::new(42, name), normal, dims, DType::F64, &Device::Cpu)?)
}

/// Variables that are created for each caller, with the same values.
fn variables() -> Result<Vb> {
    let var = |(name, dims): (&str, &[usize])| {
        Ok((name.to_string(), Var::from_tensor(&numbers(name, dims)?)?.as_tensor().clone()))
    };
    let vars = PARAMETERS.into_iter().map(var).collect::<Result<HashMap<_, _>>>()?;
    Ok(VarBuilder::from_tensors(vars, DType::F64, &Device::Cpu))
}

/// Declares two layers with a skip connection around them.
fn model() -> Result<Pipe<Vb>> {
    let mut g = PipeBuilder::<Vb>::new();
    let (x, target) = (g.input("x", In::Arg), g.input("target", In::Kwarg));
    let h = g.module("up", |vb| Ok(nn::linear(8, 32, vb.clone())?), [x]);
    let h = g.func("tanh", |xs, _| Ok(xs[0].tensor()?.tanh()?.into()), [h]);
    let y = g.module("down", |vb| Ok(nn::linear(32, 8, vb.clone())?), [h]);
    let y = g.func("skip", |xs, _| Ok((xs[0].tensor()? + xs[1].tensor()?)?.into()), [y, x]);
    g.loss_fn(|xs, _| Ok(candle_nn::loss::mse(xs[0].tensor()?, xs[1].tensor()?)?), [y, target], Reduction::Mean);
    Ok(g.finish(SplitSpec::at([("down", SplitPoint::Beginning)]))?)
}

/// Returns the loss and all gradients of plain candle on the whole batch.
fn on_one_device(x: &Tensor, target: &Tensor) -> Result<(f64, BTreeMap<&'static str, Tensor>)> {
    let vb = variables()?;
    let (up, down) = (candle_nn::linear(8, 32, vb.pp("up"))?, candle_nn::linear(32, 8, vb.pp("down"))?);
    let loss = candle_nn::loss::mse(&(down.forward(&up.forward(x)?.tanh()?)? + x)?, target)?;
    let grads = loss.backward()?;
    let grad = |(name, dims)| Ok((name, grads.get(&vb.get(dims, name)?).context(name)?.clone()));
    Ok((loss.to_scalar()?, PARAMETERS.into_iter().map(grad).collect::<Result<_>>()?))
}

/// Returns the loss on the rank of the last stage, and the gradients of this rank's stage.
fn on_ranks(ctx: &RankContext, x: &Tensor, target: &Tensor) -> Result<(Option<f64>, BTreeMap<String, Tensor>)> {
    let schedule = ScheduleKind::OneFOneB.schedule(RANKS, MICROBATCHES, 1)?;
    let pipe = model()?;
    let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &variables()?, &Device::Cpu)?;
    let kwargs = Kwargs::from([("target".into(), target.into())]);
    let batch = split_args_kwargs_into_chunks(&[x.into()], &kwargs, MICROBATCHES, None, None)?;
    if ctx.rank() == 0 {
        println!("{pipe}\n{}", runtime.program().to_csv());
    }
    let (made, counts) = comm::record(|| runtime.forward_backward(&batch, &StepOptions::default()));
    let made = made?;
    println!("rank {}: {counts}; at most {} microbatches held", ctx.rank(), made.peak_activations);
    let parameters = runtime.stages().flat_map(|stage| stage.parameters());
    let grad =
        |(name, p): (&String, &Tensor)| Ok((name.clone(), made.step.grads.get(p).context("a gradient")?.clone()));
    let loss = made.step.loss().ok().map(|loss| loss.to_scalar()).transpose()?;
    Ok((loss, parameters.map(grad).collect::<Result<_>>()?))
}

fn main() -> Result<()> {
    let (x, target) = (numbers("x", &[10, 8])?, numbers("target", &[10, 8])?); // microbatches of 3, 3, 2 and 2 rows
    let (want_loss, want) = on_one_device(&x, &target)?;
    let ranks = World::local(RANKS).run(|ctx| on_ranks(ctx, &x, &target))?;
    let loss = ranks.iter().find_map(|(loss, _)| *loss).context("a rank has the loss")?;
    ensure!((loss - want_loss).abs() < 1e-12, "loss {loss}, one device {want_loss}");
    for (name, got) in ranks.iter().flat_map(|(_, grads)| grads) {
        let off = (got - &want[name.as_str()])?.abs()?.max_all()?.to_scalar::<f64>()?;
        ensure!(off < 1e-12, "the gradient of {name} is off by {off:e}");
    }
    println!("loss {loss:.6} and all {} gradients are those of one device", want.len());
    Ok(())
}
