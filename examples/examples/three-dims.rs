//! Eight ranks on one mesh of pipeline x data x tensor run a step whose gradients equal those of one device.

use std::collections::BTreeMap;

use anyhow::{Context, Result, ensure};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor};
use candle_dist::{DataParallelOptions, DeviceMesh, RankContext, World, comm};
use candle_pipe::microbatch::Microbatches;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    In, LocalPipe, LossReduction, Pipe, PipeBuilder, Runtime, SplitPoint, SplitSpec, StepOptions, stage_op,
};
use candle_shard::nn::{Linear, MeshVarBuilder, Parameter, Parameters};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate};

const MICROBATCHES: usize = 2;
const ROWS: usize = 8;

type Grads = BTreeMap<String, Tensor>;

/// Declares four blocks, each of a layer cut by columns and one cut by rows.
fn model(split: SplitSpec) -> candle_pipe::Result<Pipe<MeshVarBuilder>> {
    let mut g = PipeBuilder::new();
    let mut h = g.input("x", In::Arg);
    for i in 0..4 {
        let block = |vb: &MeshVarBuilder| {
            let (up, down) = (Linear::new(8, 16, true, &vb.pp("up"))?, Linear::new(16, 8, true, &vb.pp("down"))?);
            let mesh = vb.mesh().clone();
            Ok(stage_op(move |xs, _| {
                let x = xs[0].tensor()?;
                let x = DTensor::from_local(x.clone(), &mesh, &[Replicate], x.shape())?;
                Ok(vec![x.add(&down.forward(&up.forward(&x)?.gelu()?)?)?.full_tensor()?.into()])
            }))
        };
        h = g.module(&format!("blocks.{i}"), block, [h]);
    }
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.tanh()?.mean_all()?), [h], LossReduction::Mean);
    g.finish(split)
}

/// Creates this rank's layers, which draw the same numbers on each mesh.
fn builder(tp: &DeviceMesh) -> Result<MeshVarBuilder> {
    let plan = Plan::new("tp").with("*.*.up", ColwiseParallel::default()).with("*.*.down", RowwiseParallel::default());
    Ok(MeshVarBuilder::fresh(42, tp, plan, DType::F64, &Device::Cpu)?)
}

/// Cuts rows of the batch into microbatches.
fn batch(first: usize, rows: usize, microbatches: usize) -> Result<Microbatches> {
    let x = Tensor::arange(0f64, 64., &Device::Cpu)?.sin()?.reshape((ROWS, 8))?.narrow(0, first, rows)?;
    Ok(Microbatches::cut(microbatches, [x])?)
}

/// Returns the whole gradients by name.
fn whole(parameters: &Parameters, grads: &GradStore) -> Result<Grads> {
    let grad = |p: &Parameter| Ok((p.name.clone(), p.grad(grads)?.context("a gradient")?.full_tensor()?));
    parameters.iter().map(grad).collect()
}

fn on_one_device(ctx: &RankContext) -> Result<(f64, Grads)> {
    let vb = builder(&ctx.mesh(&[("tp", 1)])?)?;
    let local = LocalPipe::new(&model(SplitSpec::declared())?, &vb, &Device::Cpu)?;
    let step = local.forward_backward(&batch(0, ROWS, 1)?, &StepOptions::default())?;
    Ok((step.loss()?.to_scalar()?, whole(&vb.finish()?, &step.grads)?))
}

/// Returns the loss of a replica on the rank of its last stage, and the gradients of this rank's stage.
fn on_mesh(ctx: &RankContext) -> Result<(Option<f64>, Grads)> {
    let mesh = ctx.mesh(&[("pp", 2), ("dp", 2), ("tp", 2)])?;
    let vb = builder(&mesh.axis("tp")?)?;
    let split = SplitSpec::at([("blocks.2", SplitPoint::Beginning)]);
    let schedule = ScheduleKind::OneFOneB.schedule(2, MICROBATCHES, 1)?;
    let runtime = Runtime::new(&model(split)?, &schedule, mesh.axis_group("pp")?, &vb, &Device::Cpu)?
        .with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
    let parameters = vb.built();
    let mine = batch(mesh.local_rank("dp")? * ROWS / 2, ROWS / 2, MICROBATCHES)?;
    let (made, counts) = comm::record(|| runtime.forward_backward(&mine, &StepOptions::default()));
    let mut step = made?.step;
    parameters.reduce(&mut step.grads)?;
    let (held, of) = (parameters.local_elem_count(), parameters.elem_count());
    println!("{mesh:?}: {held} of the {of} elements of its stage; {counts}");
    let loss = step.loss().ok().map(|loss| loss.to_scalar()).transpose()?;
    Ok((loss, whole(&parameters, &step.grads)?))
}

fn main() -> Result<()> {
    let (want_loss, want) = World::threads(1).run(on_one_device)?.swap_remove(0);
    let ranks = World::threads(8).run(on_mesh)?;
    let losses: Vec<f64> = ranks.iter().filter_map(|(loss, _)| *loss).collect();
    let loss = losses.iter().sum::<f64>() / losses.len() as f64;
    ensure!((loss - want_loss).abs() < 1e-12, "loss {loss}, one device {want_loss}");
    for (name, got) in ranks.iter().flat_map(|(_, grads)| grads) {
        let off = (got - &want[name])?.abs()?.max_all()?.to_scalar::<f64>()?;
        ensure!(off < 1e-12, "the gradient of {name} is off by {off:e}");
    }
    println!("loss {loss:.6} and all {} gradients are those of one device", want.len());
    Ok(())
}
