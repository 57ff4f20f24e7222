//! Dropout masks in nodes: they depend on the name, the place, the step and the rows, and on nothing else.
use crate::graph::common::numbers;
use candle_core::{DType, Device, Tensor};
use candle_dist::DeviceMesh;
use candle_pipe::microbatch::{Microbatches, Splitter};
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    Ctx, EqualCount, In, Keep, Kwargs, LocalPipe, LossReduction, PipeBuilder, Result, Runtime, StepOptions,
    Value, nn, stage_op,
};
use candle_shard::nn::{Draws, Dropout, Linear, MeshVarBuilder, Mode, recompute};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Replicate};
use std::collections::BTreeMap;
use test_utils::on_ranks;

const ROWS: usize = 6;
const TOKENS: usize = 2;

/// How a node names the mode of its layers.
type OfMode = fn(&Ctx) -> Mode;

fn of_step(ctx: &Ctx) -> Mode {
    if ctx.training { Mode::Train { step: ctx.step } } else { Mode::Eval }
}

/// A linear layer between two uses of one dropout. The second use is recomputed.
#[derive(Clone)]
struct Block {
    linear: Linear,
    dropout: Dropout,
    extra: Dropout,
}

impl Block {
    fn new(vb: &MeshVarBuilder) -> Result<Self> {
        let linear = Linear::new(3, 3, true, &vb.pp("linear"))?;
        Ok(Self { linear, dropout: Dropout::new(0.4, vb), extra: Dropout::new(0.2, &vb.pp("extra")) })
    }

    fn forward(&self, x: &DTensor, mode: Mode) -> candle_shard::Result<DTensor> {
        let this = self.clone();
        let x = self.extra.forward(x, mode)?;
        recompute(&x, move |x| this.dropout.forward(&this.linear.forward(x)?.tanh()?, mode)?.add(x))
    }

    fn twice(&self, x: &DTensor, mode: Mode) -> candle_shard::Result<DTensor> {
        self.dropout.forward(&self.forward(x, mode)?, mode)
    }
}

/// Blocks of their own, a block that three nodes share, and layers that were made outside of all nodes.
fn declare(mesh: &DeviceMesh, of_mode: OfMode) -> Result<PipeBuilder<MeshVarBuilder>> {
    let mut g = PipeBuilder::<MeshVarBuilder>::new();
    let mut h = g.input("x", In::Arg);
    let shared = g.shared_module("shared", |vb| Ok((Block::new(vb)?, vb.mesh().clone())));
    let outside = MeshVarBuilder::fresh(5, mesh, Plan::new("tp"), DType::F64, &Device::Cpu)?;
    let (ours, theirs) = (nn::Dropout::new(0.3, 9, "ours")?, Dropout::new(0.3, &outside.pp("outside")));
    for i in 0..3 {
        let own = move |vb: &MeshVarBuilder| {
            let (block, mesh) = (Block::new(vb)?, vb.mesh().clone());
            Ok(stage_op(move |xs, ctx| {
                // Several entries of dim 0 for each row.
                let x = xs[0].tensor()?;
                let flat = DTensor::replicated(&x.flatten(0, 1)?, &mesh)?;
                Ok(vec![block.twice(&flat, of_mode(ctx))?.full_tensor()?.reshape(x.shape())?.into()])
            }))
        };
        h = g.module(&format!("blocks.{i}"), own, [h]);
        type Pair = (Block, DeviceMesh);
        let call = move |(block, mesh): &Pair, xs: &[Value], ctx: &Ctx| {
            Ok(block.forward(&xs[0].on(mesh)?, of_mode(ctx))?.full_tensor()?.into())
        };
        h = g.call_with(shared, &format!("calls.{i}"), call, [h]);
        let (theirs, mesh) = (theirs.clone(), mesh.clone());
        let captured = move |xs: &[Value], ctx: &Ctx| {
            let x = ours.forward(&ours.forward(xs[0].tensor()?, ctx)?, ctx)?;
            Ok(theirs.forward(&DTensor::replicated(&x, &mesh)?, of_mode(ctx))?.full_tensor()?.into())
        };
        h = g.func(&format!("captured.{i}"), captured, [h]);
    }
    g.output("y", h);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.sum_all()?), [h], LossReduction::Sum);
    Ok(g)
}

fn builder(mesh: &DeviceMesh) -> Result<MeshVarBuilder> {
    Ok(MeshVarBuilder::fresh(5, mesh, Plan::new("tp"), DType::F64, &Device::Cpu)?)
}

fn batch(splitter: Splitter) -> Result<Microbatches> {
    splitter.split(&[numbers("x", &[ROWS, TOKENS, 3]).into()], &Kwargs::new(), None, None)
}

type Figures = BTreeMap<String, Vec<f64>>;

fn flat(t: &Tensor) -> Result<Vec<f64>> {
    Ok(t.flatten_all()?.to_vec1()?)
}

fn found(batch: &Microbatches, vb: &MeshVarBuilder, step: &mut candle_pipe::StepResult) -> Result<Figures> {
    let mut all = Figures::new();
    if step.outputs[0].get("y").is_ok() {
        all.insert("y".into(), flat(batch.merge(&step.outputs, None)?.get("y")?.tensor()?)?);
    }
    let parameters = vb.built();
    parameters.reduce(&mut step.grads)?;
    for parameter in parameters.iter() {
        if let Some(grad) = parameter.grad(&step.grads)? {
            all.insert(parameter.name.clone(), flat(&grad.full_tensor()?)?);
        }
    }
    Ok(all)
}

fn compare(got: &Figures, want: &Figures, label: &str) {
    for (name, got) in got {
        for (got, want) in got.iter().zip(&want[name]) {
            assert!(
                (got - want).abs() < 1e-11 * (1.0 + want.abs()),
                "{label}: {name}: {got}, expected {want}"
            );
        }
    }
}

fn local(
    tp: usize,
    of_mode: OfMode,
    run: impl Fn(&LocalPipe, &MeshVarBuilder) -> Result<Figures> + Send + Sync + Copy + 'static,
    stages: usize,
) -> Figures {
    on_ranks(tp, "masks", move |ctx| -> Result<Figures> {
        let mesh = ctx.mesh(&[("tp", tp)])?;
        let vb = builder(&mesh)?;
        let pipe = declare(&mesh, of_mode)?.finish(EqualCount(stages))?;
        run(&LocalPipe::new(&pipe, &vb, &Device::Cpu)?, &vb)
    })
    .swap_remove(0)
}

fn step(local: &LocalPipe, vb: &MeshVarBuilder, splitter: Splitter, keep: Keep) -> Result<Figures> {
    let batch = batch(splitter)?;
    let mut step = local.forward_backward(&batch, &StepOptions::default().step(3).keep(keep))?;
    found(&batch, vb, &mut step)
}

#[test]
fn masks_of_nodes_do_not_depend_on_cuts_passes_and_what_is_kept() {
    for of_mode in [Ctx::mode, of_step] {
        let want = local(1, of_mode, |local, vb| step(local, vb, Splitter::new(1), Keep::Activations), 1);
        assert_eq!(want.len(), 9, "{:?}", want.keys());
        for stages in [1, 2, 5, 9] {
            let run = |local: &LocalPipe, vb: &MeshVarBuilder| {
                let mut all = Vec::new();
                for chunks in [1, 2, 3] {
                    for keep in [Keep::Activations, Keep::Inputs] {
                        all.push(step(local, vb, Splitter::new(chunks), keep)?);
                        // What else runs in between changes nothing.
                        local.evaluate(&batch(Splitter::new(2))?, &StepOptions::default())?;
                        local.forward(&[numbers("x", &[4, TOKENS, 3]).into()], &Kwargs::new())?;
                        all.push(step(local, vb, Splitter::new(chunks).masked(), keep)?);
                    }
                }
                for (i, other) in all.iter().enumerate() {
                    compare(other, &all[0], &format!("run {i}"));
                }
                Ok(all.swap_remove(0))
            };
            for tp in [1, 2] {
                let got = local(tp, of_mode, run, stages);
                assert_eq!(got.len(), want.len());
                compare(&got, &want, &format!("{stages} stages, tp {tp}"));
            }
        }
    }
}

#[test]
fn masks_of_nodes_do_not_depend_on_schedules_and_ranks() {
    for of_mode in [Ctx::mode, of_step] {
        let want = local(1, of_mode, |local, vb| step(local, vb, Splitter::new(1), Keep::Activations), 1);
        for (pp, tp, kind, per_rank) in [
            (2, 1, ScheduleKind::GPipe, 1),
            (3, 1, ScheduleKind::OneFOneB, 1),
            (2, 2, ScheduleKind::Zbv, 2),
            (2, 1, ScheduleKind::Interleaved1F1B, 2),
            (4, 1, ScheduleKind::ZbH1, 1),
        ] {
            for is_masked in [false, true] {
                let want = want.clone();
                let label = format!("masks: {kind}, pp {pp}, tp {tp}, masked {is_masked}");
                on_ranks(pp * tp, &label.clone(), move |ctx| -> Result<()> {
                    let mesh = ctx.mesh(&[("pp", pp), ("tp", tp)])?;
                    let (tp, schedule) = (mesh.axis("tp")?, kind.schedule(pp, 4, per_rank)?);
                    let vb = builder(&tp)?;
                    let pipe = declare(&tp, of_mode)?.finish(EqualCount(schedule.stages()))?;
                    let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &Device::Cpu)?;
                    for keep in [Keep::Activations, Keep::Inputs, Keep::Activations] {
                        let splitter = Splitter::new(4);
                        let batch = batch(if is_masked { splitter.masked() } else { splitter })?;
                        let options = StepOptions::default().step(3).keep(keep);
                        let mut step = runtime.forward_backward(&batch, &options)?.step;
                        // The gradients of the shared block are summed over its stages.
                        compare(&found(&batch, &vb, &mut step)?, &want, &label);
                        runtime.evaluate(&batch, &StepOptions::default())?;
                    }
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn masks_of_a_pipe_are_those_of_the_plain_model() {
    on_ranks(2, "masks of the plain model", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 2)])?;
        let mut g = PipeBuilder::<MeshVarBuilder>::new();
        let mut h = g.input("x", In::Arg);
        let shared = g.shared_module("shared", |vb| Ok((Block::new(vb)?, vb.mesh().clone())));
        for i in 0..3 {
            let own = |vb: &MeshVarBuilder| {
                let (block, mesh) = (Block::new(vb)?, vb.mesh().clone());
                Ok(stage_op(move |xs, ctx| {
                    Ok(vec![block.twice(&xs[0].on(&mesh)?, ctx.mode())?.full_tensor()?.into()])
                }))
            };
            h = g.module(&format!("blocks.{i}"), own, [h]);
            type Pair = (Block, DeviceMesh);
            let call = |(block, mesh): &Pair, xs: &[Value], ctx: &Ctx| {
                Ok(block.forward(&xs[0].on(mesh)?, ctx.mode())?.full_tensor()?.into())
            };
            h = g.call_with(shared, &format!("calls.{i}"), call, [h]);
        }
        g.output("y", h);
        g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.sum_all()?), [h], LossReduction::Sum);
        let vb = builder(&mesh)?;
        let local = LocalPipe::new(&g.finish(EqualCount(4))?, &vb, &Device::Cpu)?;
        let batch = batch(Splitter::new(3))?;
        let step = local.forward_backward(&batch, &StepOptions::default().step(3))?;
        let got = flat(batch.merge(&step.outputs, None)?.get("y")?.tensor()?)?;

        let vb = builder(&mesh)?;
        let blocks = (0..3).map(|i| Block::new(&vb.pp(format!("blocks.{i}")))).collect::<Result<Vec<_>>>()?;
        let (shared, mode) = (Block::new(&vb.pp("shared"))?, Mode::Train { step: 3 });
        let mut h = DTensor::replicated(&numbers("x", &[ROWS, TOKENS, 3]), &mesh)?;
        for block in &blocks {
            h = shared.forward(&block.twice(&h, mode)?, mode)?;
        }
        let want = flat(&h.full_tensor()?)?;
        assert!(
            got.iter().zip(&want).all(|(got, want)| (got - want).abs() < 1e-11),
            "{got:?}, expected {want:?}"
        );
        Ok(())
    });
}

#[test]
fn every_place_and_use_has_a_mask_of_its_own() -> Result<()> {
    let mut g = PipeBuilder::<()>::new();
    let x = g.input("x", In::Arg);
    let shared = g.shared_module("drop", |()| nn::Dropout::new(0.5, 3, "drop"));
    let captured = nn::Dropout::new(0.5, 3, "captured")?;
    for name in ["a", "b", "c"] {
        let y = g.call(shared, name, [x]);
        g.output(name, y);
        // A layer of one name in each of these nodes.
        let own = |(): &()| nn::Dropout::new(0.5, 3, "own");
        let y = g.module(&format!("{name}.own"), own, [x]);
        g.output(format!("{name}.own"), y);
        let twice = move |xs: &[Value], ctx: &Ctx| {
            let drop = || Ok::<_, candle_pipe::Error>(captured.forward(xs[0].tensor()?, ctx)?.into());
            Ok([drop()?, drop()?])
        };
        let [first, second] = g.func_many(&format!("{name}.twice"), twice, [x]);
        g.output(format!("{name}.first"), first);
        g.output(format!("{name}.second"), second);
    }
    let y = g.func("sum", |xs, _| Ok(xs[0].tensor()?.sum_all()?.into()), [x]);
    g.loss(y, LossReduction::Sum);
    let local = LocalPipe::new(&g.finish(EqualCount(3))?, &(), &Device::Cpu)?;
    let x = Tensor::ones((8, 8), DType::F64, &Device::Cpu)?;
    let run = |splitter: Splitter| -> Result<BTreeMap<String, Vec<f64>>> {
        let batch = splitter.split(&[(&x).into()], &Kwargs::new(), None, None)?;
        let step = local.forward_backward(&batch, &StepOptions::default())?;
        let merged = batch.merge(&step.outputs, None)?;
        merged.map()?.iter().map(|(name, value)| Ok((name.clone(), flat(value.tensor()?)?))).collect()
    };
    let want = run(Splitter::new(1))?;
    let different: std::collections::BTreeSet<Vec<u64>> =
        want.values().map(|mask| mask.iter().map(|x| x.to_bits()).collect()).collect();
    assert_eq!(different.len(), 12, "a mask was drawn twice");
    for splitter in [Splitter::new(1), Splitter::new(3), Splitter::new(8), Splitter::new(3).masked()] {
        assert_eq!(run(splitter)?, want);
    }
    Ok(())
}

#[test]
fn rows_that_are_not_in_dim_0_are_refused_in_a_node() {
    on_ranks(1, "rows", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("tp", 1)])?;
        let dropout = Dropout::new(0.5, &builder(&mesh)?);
        let at = |rows: usize, dims: &[usize]| {
            let x = DTensor::ones(dims, DType::F64, &Device::Cpu, &mesh, &[Replicate])?;
            Draws::at("node", None, 0..rows, || dropout.forward(&x, Mode::Train { step: 0 }))
        };
        let said = at(2, &[5, 3]).unwrap_err().to_string();
        assert!(said.contains("random numbers of shape [5, 3] for 2 rows"), "{said}");
        assert!(at(2, &[4, 3]).is_ok() && at(0, &[0, 3]).is_ok());
        Ok(())
    });
}
