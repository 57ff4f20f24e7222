//! Sharded tensors as values between nodes, within stages and from one to another, against one device.
use crate::runtime::parity::close;
use candle_core::{DType, Tensor};
use candle_dist::{DeviceMesh, World, comm};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    EqualCount, In, Keep, Kwargs, LocalPipe, LossReduction, PipeBuilder, Result, Runtime, StepOptions, Value,
    sharded_op,
};
use candle_shard::Shard;
use candle_shard::nn::{LayerNorm, Linear, MeshVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel, SequenceParallel};
use std::collections::BTreeMap;
use test_utils::{device, distribute, on_ranks};

const ROWS: usize = 5;

/// Blocks whose results lie in three ways, a value of both kinds that skips two of them, and a loss that is sharded.
fn declare() -> PipeBuilder<MeshVarBuilder> {
    let mut g = PipeBuilder::<MeshVarBuilder>::new();
    let x = g.input("x", In::Arg);
    let mut h = x;
    let mut side = x;
    for i in 0..3 {
        let block = move |vb: &MeshVarBuilder| {
            let (up, down) =
                (Linear::new(4, 5, true, &vb.pp("up"))?, Linear::new(5, 4, true, &vb.pp("down"))?);
            let norm = LayerNorm::new(4, 1e-5, &vb.pp("norm"))?;
            Ok(sharded_op(vb.mesh(), move |x| {
                let y = down.forward(&up.forward(&norm.forward(x)?)?.tanh()?)?.add(x)?;
                match i {
                    0 => y.redistribute(&[Shard(0)]), // uneven, and on many ranks empty
                    1 => y.redistribute(&[Shard(1)]),
                    _ => Ok(y),
                }
            }))
        };
        h = g.module(&format!("blocks.{i}"), block, [h]);
        if i == 0 {
            let fork = |xs: &[Value], _: &candle_pipe::Ctx| {
                let x = xs[0].dtensor()?;
                Ok([x.clone().into(), (x.sqr()?, 3, x.sum(0)?).into()])
            };
            [h, side] = g.func_many("fork", fork, [h]);
        }
    }
    let join = |xs: &[Value], _: &candle_pipe::Ctx| {
        let (h, side) = (xs[0].dtensor()?, xs[1].at(0)?.dtensor()?);
        // What was summed over rows is a partial sum until it is used.
        Ok((h.add(&side.mul(xs[1].at(1)?.int()? as f64)?)?.add(xs[1].at(2)?.dtensor()?)?).into())
    };
    let y = g.func("join", join, [h, side]);
    g.output("y", y);
    let mean = g.func("mean", |xs, _| Ok(xs[0].dtensor()?.sqr()?.sum_all()?.into()), [y]);
    g.loss(mean, LossReduction::Sum);
    g
}

fn batch(chunks: usize) -> Result<Microbatches> {
    let x =
        Tensor::arange(0f64, (4 * ROWS) as f64, &device())?.affine(0.7, 0.3)?.sin()?.reshape((ROWS, 4))?;
    split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), chunks, None, None)
}

fn builder(mesh: &DeviceMesh) -> Result<MeshVarBuilder> {
    let plan = plan_without_norms().with("*.*.norm", SequenceParallel::default().dim(0));
    Ok(MeshVarBuilder::fresh(5, mesh, plan, DType::F64, &device())?)
}

/// A builder of blocks without norms, because a pattern that matches nothing is an error.
fn builder_without_norms(mesh: &DeviceMesh) -> Result<MeshVarBuilder> {
    Ok(MeshVarBuilder::fresh(5, mesh, plan_without_norms(), DType::F64, &device())?)
}

fn plan_without_norms() -> Plan {
    Plan::new("tp").with("*.*.up", ColwiseParallel::default()).with("*.*.down", RowwiseParallel::default())
}

fn numbers(t: &Tensor) -> Result<Vec<f64>> {
    Ok(t.flatten_all()?.to_vec1()?)
}

type Found = BTreeMap<String, Vec<f64>>;

/// Whole gradients by name.
fn gradients(vb: &MeshVarBuilder, grads: &mut candle_core::backprop::GradStore) -> Result<Found> {
    let parameters = vb.built();
    parameters.reduce(grads)?;
    let whole = parameters.iter().map(|p| {
        let grad =
            p.grad(grads)?.ok_or_else(|| candle_pipe::Error::Pipe(format!("no gradient of {}", p.name)))?;
        Ok((p.name.clone(), numbers(&grad.full_tensor()?)?))
    });
    whole.collect()
}

fn one_device(chunks: usize) -> Found {
    let run = World::threads(1).run(move |ctx| -> Result<Found> {
        let vb = builder(&ctx.mesh(&[("tp", 1)])?)?;
        let local = LocalPipe::new(&declare().finish(EqualCount(1))?, &vb, &device())?;
        let batch = batch(chunks)?;
        let mut step = local.forward_backward(&batch, &StepOptions::default())?;
        let mut found = gradients(&vb, &mut step.grads)?;
        found.insert("loss".into(), numbers(step.loss()?)?);
        found.insert("y".into(), numbers(&batch.merge(&step.outputs, None)?.get("y")?.full_tensor()?)?);
        Ok(found)
    });
    run.unwrap().swap_remove(0)
}

fn compare(found: &Found, want: &Found, label: &str) {
    for (name, got) in found {
        close(got, &want[name], 1e-12, &format!("{label}: {name}"));
    }
}

#[test]
fn sharded_values_pass_between_stages_of_one_process() {
    for tp in 1..=4 {
        for (stages, chunks) in [(1, 1), (2, 2), (3, 5), (4, 2)] {
            let want = one_device(chunks);
            let label = format!("tp {tp}, {stages} stages, {chunks} microbatches");
            on_ranks(tp, &label.clone(), move |ctx| -> Result<()> {
                let vb = builder(&ctx.mesh(&[("tp", tp)])?)?;
                let local = LocalPipe::new(&declare().finish(EqualCount(stages))?, &vb, &device())?;
                let batch = batch(chunks)?;
                for keep in [Keep::Activations, Keep::Inputs] {
                    let mut step = local.forward_backward(&batch, &StepOptions::default().keep(keep))?;
                    let mut found = gradients(&vb, &mut step.grads)?;
                    found.insert("loss".into(), numbers(step.loss()?)?);
                    found.insert(
                        "y".into(),
                        numbers(&batch.merge(&step.outputs, None)?.get("y")?.full_tensor()?)?,
                    );
                    assert_eq!(found.len(), want.len());
                    compare(&found, &want, &label);
                }
                let loss = numbers(local.evaluate(&batch, &StepOptions::default())?.loss()?)?;
                close(&loss, &want["loss"], 1e-12, &label);
                Ok(())
            });
        }
    }
}

#[test]
fn sharded_values_pass_between_ranks() {
    for (pp, tp, kind, per_rank) in [
        (1, 2, ScheduleKind::OneFOneB, 1),
        (2, 2, ScheduleKind::OneFOneB, 1),
        (2, 2, ScheduleKind::Zbv, 2),
        (3, 1, ScheduleKind::ZbH1, 1),
        (4, 2, ScheduleKind::ZbH1, 1),
        (2, 3, ScheduleKind::OneFOneB, 1),
    ] {
        let want = one_device(4);
        let count = want.len();
        let label = format!("{kind}, pp {pp}, tp {tp}");
        let found = on_ranks(pp * tp, &label.clone(), move |ctx| -> Result<Found> {
            let mesh = ctx.mesh(&[("pp", pp), ("tp", tp)])?;
            let (vb, schedule) = (builder(&mesh.axis("tp")?)?, kind.schedule(pp, 4, per_rank)?);
            let pipe = declare().finish(EqualCount(schedule.stages()))?;
            let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &device())?;
            let batch = batch(4)?;
            let mut found = Found::new();
            for keep in [Keep::Activations, Keep::Inputs] {
                let mut step = runtime.forward_backward(&batch, &StepOptions::default().keep(keep))?.step;
                found = gradients(&vb, &mut step.grads)?;
                if let Ok(loss) = step.loss() {
                    found.insert("loss".into(), numbers(loss)?);
                }
                if step.outputs[0].get("y").is_ok() {
                    let y = batch.merge(&step.outputs, None)?.get("y")?.full_tensor()?;
                    found.insert("y".into(), numbers(&y)?);
                }
                compare(&found, &want, &label);
            }
            Ok(found)
        });
        let all: std::collections::BTreeSet<String> =
            found.into_iter().flatten().map(|(name, _)| name).collect();
        assert_eq!(all.len(), count, "{kind}");
    }
}

/// Linear layers whose results go from stage to stage as `lies` has them, some used twice: by a sharded layer, and as they are.
fn cut_between(lies: fn(usize) -> [candle_shard::Placement; 1]) -> PipeBuilder<MeshVarBuilder> {
    let mut g = PipeBuilder::<MeshVarBuilder>::new();
    let x = g.input("x", In::Arg);
    let mut h = x;
    for i in 0..4 {
        let y = h;
        let up = move |vb: &MeshVarBuilder| {
            let up = Linear::new(4, 5, true, &vb.pp("up"))?;
            Ok(sharded_op(vb.mesh(), move |x| up.forward(x)?.tanh()))
        };
        h = g.module(&format!("blocks.{i}"), up, [h]);
        let down = move |vb: &MeshVarBuilder| {
            let down = Linear::new(5, 4, true, &vb.pp("down"))?;
            Ok(sharded_op(vb.mesh(), move |x| down.forward(x)?.redistribute(&lies(i))))
        };
        h = g.module(&format!("blocks.b{i}"), down, [h]);
        if i > 0 {
            h = g.func(
                &format!("add{i}"),
                |xs, _| Ok(xs[0].dtensor()?.add(xs[1].dtensor()?)?.into()),
                [h, y],
            );
        }
    }
    g.output("y", h);
    let mean = g.func("mean", |xs, _| Ok(xs[0].dtensor()?.sqr()?.sum_all()?.into()), [h]);
    g.loss(mean, LossReduction::Sum);
    g
}

#[test]
fn partial_and_replicated_values_pass_between_ranks_as_on_one_device() {
    use candle_shard::{Placement, Replicate};
    type Lies = fn(usize) -> [Placement; 1];
    let kinds: [(&str, Lies); 3] = [
        ("partial", |_| [Placement::PARTIAL_SUM]),
        ("replicated", |_| [Replicate]),
        ("mixed", |i| [[Placement::PARTIAL_SUM, Replicate, Shard(1), Shard(0)][i]]),
    ];
    for (name, lies) in kinds {
        let want = on_ranks(1, name, move |ctx| -> Result<Found> {
            let vb = builder_without_norms(&ctx.mesh(&[("tp", 1)])?)?;
            let local = LocalPipe::new(&cut_between(|_| [Replicate]).finish(EqualCount(1))?, &vb, &device())?;
            let mut step = local.forward_backward(&batch(4)?, &StepOptions::default())?;
            let mut found = gradients(&vb, &mut step.grads)?;
            found.insert("loss".into(), numbers(step.loss()?)?);
            Ok(found)
        })
        .swap_remove(0);
        for (pp, tp, kind, per_rank) in [
            (1, 3, ScheduleKind::OneFOneB, 1),
            (2, 2, ScheduleKind::OneFOneB, 1),
            (2, 2, ScheduleKind::Zbv, 2),
            (3, 2, ScheduleKind::ZbH1, 1),
            (4, 1, ScheduleKind::GPipe, 1),
            (2, 2, ScheduleKind::Interleaved1F1B, 4),
        ] {
            let want = want.clone();
            let label = format!("{name}, {kind}, pp {pp}, tp {tp}");
            on_ranks(pp * tp, &label.clone(), move |ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("pp", pp), ("tp", tp)])?;
                let (vb, schedule) =
                    (builder_without_norms(&mesh.axis("tp")?)?, kind.schedule(pp, 4, per_rank)?);
                let pipe = cut_between(lies).finish(EqualCount(schedule.stages()))?;
                let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &device())?;
                let batch = batch(4)?;
                for keep in [Keep::Activations, Keep::Inputs] {
                    let mut step = runtime.forward_backward(&batch, &StepOptions::default().keep(keep))?.step;
                    let mut found = gradients(&vb, &mut step.grads)?;
                    if let Ok(loss) = step.loss() {
                        found.insert("loss".into(), numbers(loss)?);
                    }
                    assert!(!found.is_empty());
                    compare(&found, &want, &label);
                }
                Ok(())
            });
        }
    }
}

#[test]
fn a_cut_between_sharded_values_costs_no_collective() {
    let counts = on_ranks(2, "collectives", |ctx| -> Result<Vec<usize>> {
        let count = |stages: usize| {
            let vb = builder(&ctx.mesh(&[("tp", 2)])?)?;
            let local = LocalPipe::new(&declare().finish(EqualCount(stages))?, &vb, &device())?;
            let (step, counts) = comm::record(|| local.forward_backward(&batch(2)?, &StepOptions::default()));
            step.map(|_| counts.total())
        };
        (1..=4).map(count).collect()
    });
    assert!(
        counts.iter().all(|counts| counts[0] > 0 && counts.iter().all(|count| *count == counts[0])),
        "{counts:?}"
    );
}

#[test]
fn sharded_values_where_they_cannot_be_are_refused() {
    let texts = on_ranks(2, "no mesh", |ctx| -> Result<Vec<String>> {
        let mesh = DeviceMesh::new(&ctx.group().subgroup(&[ctx.rank()])?, &[("tp", 1)])?;
        let spread = distribute(&Tensor::ones((4, 2), DType::F64, &device())?, &mesh, &[Shard(0)])?;
        let cut = split_args_kwargs_into_chunks(&[spread.clone().into()], &Kwargs::new(), 2, None, None);
        let mut texts = vec![cut.map(drop).unwrap_err().to_string()];

        let mut g = PipeBuilder::<()>::new();
        let x = g.input("x", In::Arg);
        let h = g.func("spread", move |_, _| Ok((&spread).into()), [x]);
        let y = g.func("sum", |xs, _| Ok(xs[0].dtensor()?.sum_all()?.full_tensor()?.into()), [h]);
        g.output("y", y);
        let schedule = ScheduleKind::GPipe.schedule(2, 1, 1)?.forward_only();
        let runtime = Runtime::new(&g.finish(EqualCount(2))?, &schedule, ctx.group(), &(), &device())?;
        texts.push(runtime.evaluate(&batch(1)?, &StepOptions::default()).map(drop).unwrap_err().to_string());
        Ok(texts)
    });
    for texts in &texts {
        assert!(
            texts[0].contains("args[0] is f64[4@tp, 2], a sharded tensor, which is not cut; use Replicate"),
            "{texts:?}"
        );
        assert!(texts[1].contains("came to a stage whose scope has no mesh"), "{texts:?}");
    }
}

#[test]
fn ranks_of_a_stage_have_the_same_step() {
    for (pp, tp) in [(1, 2), (2, 2), (1, 3), (2, 1)] {
        let label = format!("pp {pp}, tp {tp}");
        on_ranks(pp * tp, &label, move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("pp", pp), ("tp", tp)])?;
            let (vb, schedule) = (builder(&mesh.axis("tp")?)?, ScheduleKind::OneFOneB.schedule(pp, 2, 1)?);
            let pipe = declare().finish(EqualCount(pp))?;
            let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &device())?;
            let is_odd = mesh.local_rank("tp")? == 1;
            let (batch, plain) = (batch(2)?, StepOptions::default());
            let refused = |options: StepOptions, why: &str| -> Result<()> {
                let mine = if is_odd { &options } else { &plain };
                match runtime.forward_backward(&batch, mine) {
                    Ok(_) if tp == 1 => Ok(()),
                    Ok(_) => panic!("{why}: nobody says so"),
                    Err(said) => {
                        assert!(said.to_string().contains(why), "{said}");
                        Ok(())
                    }
                }
            };
            refused(plain.clone().step(3), "the number of the step of rank ")?;
            refused(plain.clone().keep(Keep::Inputs), "the data that stages keep of rank ")?;
            if tp > 1 {
                // All of them or none train.
                let made = if is_odd {
                    runtime.evaluate(&batch, &plain)
                } else {
                    runtime.forward_backward(&batch, &plain)
                };
                let said = made.map(drop).unwrap_err().to_string();
                assert!(said.contains("the mode (train or evaluate) of rank "), "{said}");
            }
            runtime.forward_backward(&batch, &plain).map(drop)
        });
    }
}

#[test]
fn ranks_of_a_stage_have_the_same_pipeline() {
    let said = on_ranks(2, "schedules", |ctx| -> Result<String> {
        let mesh = ctx.mesh(&[("pp", 1), ("tp", 2)])?;
        let kind = if ctx.rank() == 1 { ScheduleKind::GPipe } else { ScheduleKind::OneFOneB };
        let (vb, schedule) = (builder(&mesh.axis("tp")?)?, kind.schedule(1, 2, 1)?);
        let pipe = declare().finish(EqualCount(1))?;
        let made = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &device());
        Ok(made.map(drop).unwrap_err().to_string())
    });
    said.iter().for_each(|said| assert!(said.contains("description differs"), "{said}"));
}
