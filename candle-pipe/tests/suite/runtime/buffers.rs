//! Variables that change without a gradient: the running statistics of batch norms.
use crate::runtime::model::{Vb, numbers};
use candle_core::{DType, Tensor, Var};
use candle_dist::{DataParallelOptions, DeviceMesh, Op, comm};
use candle_nn::{VarBuilder, VarMap};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::nn::linear_no_bias;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    Ctx, In, Kwargs, LossReduction, Pipe, PipeBuilder, Result, Runtime, SplitSpec, StageOp, StepOptions,
    Value, sharded_op,
};
use candle_shard::nn::{Embedding, MeshVarBuilder, ModuleT};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, EmbeddingOptions, Replicate};
use std::collections::BTreeMap;
use test_utils::{device, on_ranks};

/// Two stages, each with a batch norm; or one of both.
fn declare(shared: bool, norms: bool) -> Result<Pipe<Vb>> {
    let mut g = PipeBuilder::<Vb>::new();
    let mut h = g.input("x", In::Arg);
    let norm = shared.then(|| g.shared_module("norm", |vb| Ok(candle_nn::batch_norm(3, 1e-5, vb.clone())?)));
    for i in 0..2 {
        h = g.module(&format!("linear.{i}"), |vb| Ok(linear_no_bias(3, 3, vb.clone())?), [h]);
        h = match norm {
            Some(norm) => g.call(norm, &format!("call.{i}"), [h]),
            None if norms => {
                g.module(&format!("norm.{i}"), |vb| Ok(candle_nn::batch_norm(3, 1e-5, vb.clone())?), [h])
            }
            None => h,
        };
        if i == 0 {
            g.split();
        }
    }
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.powf(4.0)?.mean_all()?), [h], LossReduction::Mean);
    g.finish(SplitSpec::declared())
}

fn batch(seed: usize) -> Result<Microbatches> {
    let x = Tensor::arange(0f64, 24., &device())?
        .affine(0.7, seed as f64)?
        .sin()?
        .affine(1.0 + seed as f64, 0.3)?;
    split_args_kwargs_into_chunks(&[x.reshape((8, 3))?.into()], &Kwargs::new(), 2, None, None)
}

fn running(runtime: &Runtime) -> Result<BTreeMap<String, Vec<f64>>> {
    let named = runtime.named_vars()?.into_iter().filter(|(name, _)| name.contains("running"));
    named.map(|(name, var)| Ok((name, numbers(&var)?))).collect()
}

#[test]
fn replicas_have_the_running_statistics_of_the_first_one() {
    for pp in [1, 2] {
        let found = on_ranks(
            pp * 3,
            &format!("{pp} stages"),
            move |ctx| -> Result<(usize, usize, BTreeMap<String, Vec<f64>>)> {
                let mesh = ctx.mesh(&[("pp", pp), ("dp", 3)])?;
                let kind = if pp == 1 { ScheduleKind::LoopedBfs } else { ScheduleKind::OneFOneB };
                let schedule = kind.schedule(pp, 2, 2 / pp)?;
                let build = |norms| -> Result<Runtime> {
                    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F64, &device());
                    let runtime = Runtime::new(
                        &declare(false, norms)?,
                        &schedule,
                        mesh.axis_group("pp")?,
                        &vb,
                        &device(),
                    )?;
                    runtime.with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())
                };
                let (runtime, replica) = (build(true)?, mesh.local_rank("dp")?);
                let mut before = running(&runtime)?;
                for step in 0..4 {
                    runtime.forward_backward(&batch(replica + step)?, &StepOptions::default())?;
                    let after = running(&runtime)?;
                    assert!(!after.is_empty() && after != before, "the pass has changed them");
                    before = after;
                }
                // Without buffers nothing is sent for them.
                let plain = build(false)?;
                for _ in 0..2 {
                    plain.forward_backward(&batch(replica)?, &StepOptions::default())?;
                }
                let (step, counts) =
                    comm::record(|| plain.forward_backward(&batch(replica)?, &StepOptions::default()));
                step?;
                assert_eq!(counts.get(Op::Broadcast).count, 0);
                Ok((mesh.local_rank("pp")?, replica, before))
            },
        );
        for (stage, replica, stats) in &found {
            let (.., first) = found.iter().find(|(at, replica, _)| at == stage && *replica == 0).unwrap();
            assert_eq!(stats, first, "stage {stage}, replica {replica}");
        }
    }
}

/// A layer with a buffer of some elements that follows the batches from a step on.
struct Late {
    from: u64,
    buffer: Var,
}

impl StageOp for Late {
    fn forward(&self, inputs: &[Value], ctx: &Ctx) -> Result<Vec<Value>> {
        let x = inputs[0].tensor()?;
        if ctx.training && ctx.step >= self.from {
            let mean = x.detach().mean_all()?.broadcast_as(self.buffer.shape())?;
            self.buffer.set(&((self.buffer.as_detached_tensor() * 0.5)? + mean)?)?;
        }
        Ok(vec![x.clone().into()])
    }
}

/// A weight and a late buffer, in one stage or in a module that two stages share.
fn declare_late(from: u64, elements: usize, shared: bool) -> Result<Pipe<Vb>> {
    let late = move |vb: &Vb| {
        let buffer =
            Var::from_tensor(&vb.get_with_hints(elements, "running", candle_nn::Init::Const(0.0))?)?;
        Ok(Late { from, buffer })
    };
    let mut g = PipeBuilder::<Vb>::new();
    let mut h = g.input("x", In::Arg);
    let module = shared.then(|| g.shared_module("late", late));
    for i in 0..if shared { 2 } else { 1 } {
        h = match module {
            Some(module) => g.call(module, &format!("call.{i}"), [h]),
            None => g.module("late", late, [h]),
        };
        h = g.module(&format!("linear.{i}"), |vb| Ok(linear_no_bias(3, 3, vb.clone())?), [h]);
        if shared && i == 0 {
            g.split();
        }
    }
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [h], LossReduction::Mean);
    g.finish(SplitSpec::declared())
}

#[test]
fn buffers_that_begin_to_change_later_are_those_of_the_first_replica() {
    for (from, elements) in [(1, 3), (2, 3), (4, 3), (2, 20_000), (5, 20_000)] {
        let found = on_ranks(2, &format!("{elements} from {from}"), move |ctx| -> Result<Vec<Vec<f64>>> {
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F64, &device());
            let alone = ctx.group().subgroup(&[ctx.rank()])?;
            let schedule = ScheduleKind::GPipe.schedule(1, 2, 1)?;
            let runtime =
                Runtime::new(&declare_late(from, elements, false)?, &schedule, &alone, &vb, &device())?
                    .with_replicas(ctx.group(), &DataParallelOptions::default())?;
            let mut steps = Vec::new();
            for step in 0..9 {
                runtime.forward_backward(
                    &batch(ctx.rank() + step)?,
                    &StepOptions::default().step(step as u64),
                )?;
                steps.push(running(&runtime)?.into_values().flatten().take(1).collect());
            }
            Ok(steps)
        });
        // Large ones are found in steps 4 and 8, which are the fourth and the eighth.
        let known = if elements < 100 { from as usize } else { (from as usize + 1).next_power_of_two() - 1 };
        let is_alike: Vec<bool> = (0..9).map(|step| found[0][step] == found[1][step]).collect();
        let want: Vec<bool> = (0..9).map(|step| step < from as usize || step >= known).collect();
        assert_eq!(is_alike, want, "{elements} from {from}");
        assert!(found[0].iter().flatten().filter(|&&x| x != 0.0).count() >= 4, "{found:?}");
    }
}

#[test]
fn a_module_of_several_ranks_whose_buffers_begin_to_change_later_is_refused_then() {
    let ends = on_ranks(2, "late", |ctx| -> Result<(usize, String)> {
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F64, &device());
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        let runtime = Runtime::new(&declare_late(4, 3, true)?, &schedule, ctx.group(), &vb, &device())?;
        for step in 0..9 {
            let made = runtime.forward_backward(&batch(step)?, &StepOptions::default().step(step as u64));
            if let Err(error) = made {
                return Ok((step, error.to_string()));
            }
        }
        Ok((9, String::new()))
    });
    for (step, text) in ends {
        assert!(step == 4 && text.contains("\"late\" is on several ranks, and its copies"), "{step}: {text}");
    }
}

/// Each rank would follow the batches of its own calls.
#[test]
fn a_module_of_several_ranks_with_running_statistics_is_refused_by_all() {
    let texts = on_ranks(2, "shared", |ctx| -> Result<String> {
        let vb = || VarBuilder::from_varmap(&VarMap::new(), DType::F64, &device());
        let alone = ctx.group().subgroup(&[ctx.rank()])?;
        let schedule = ScheduleKind::LoopedBfs.schedule(1, 2, 2)?;
        let runtime = Runtime::new(&declare(true, true)?, &schedule, &alone, &vb(), &device())?;
        runtime.forward_backward(&batch(0)?, &StepOptions::default())?;
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        let runtime = Runtime::new(&declare(true, true)?, &schedule, ctx.group(), &vb(), &device())?;
        Ok(runtime.forward_backward(&batch(0)?, &StepOptions::default()).unwrap_err().to_string())
    });
    texts
        .iter()
        .for_each(|text| assert!(text.contains("\"norm\" is on several ranks, and its copies"), "{text}"));
}

/// A batch norm over the ranks of a mesh, in replicas of the mesh.
#[test]
fn so_have_replicas_of_a_mesh() {
    let found = on_ranks(4, "mesh", |ctx| -> Result<Vec<Vec<f64>>> {
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
        let mut g = PipeBuilder::<MeshVarBuilder>::new();
        let x = g.input("x", In::Arg);
        let norm = |vb: &MeshVarBuilder| {
            let norm = candle_shard::nn::batch_norm(3, 1e-5, vb)?;
            Ok(sharded_op(vb.mesh(), move |x| norm.forward_t(x, true)))
        };
        let y = g.module("norm", norm, [x]);
        g.loss_fn(
            |xs, _| Ok(xs[0].dtensor()?.powf(4.0)?.mean_all()?.full_tensor()?),
            [y],
            LossReduction::Mean,
        );
        let vb = MeshVarBuilder::fresh(1, &mesh.axis("tp")?, Plan::new("tp"), DType::F64, &device())?;
        let group = ctx.group().subgroup(&[ctx.rank()])?;
        let schedule = ScheduleKind::GPipe.schedule(1, 2, 1)?;
        let runtime = Runtime::new(&g.finish(SplitSpec::declared())?, &schedule, &group, &vb, &device())?
            .with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
        for step in 0..3 {
            runtime.forward_backward(&batch(mesh.local_rank("dp")? + step)?, &StepOptions::default())?;
        }
        Ok(running(&runtime)?.into_values().collect())
    });
    assert!(found.iter().all(|stats| stats.len() == 2 && *stats == found[0]), "{found:?}");
}

/// `max_norm` changes the copy of the stage that looks up, and not that of the head.
#[test]
fn a_table_of_several_ranks_whose_norms_lookups_limit_is_refused_by_all() {
    let texts = on_ranks(2, "limited", |ctx| -> Result<String> {
        let mut g = PipeBuilder::<MeshVarBuilder>::new();
        let ids = g.input("ids", In::Arg);
        let table = g.shared_module("table", |vb: &MeshVarBuilder| {
            let options = EmbeddingOptions::default().max_norm(0.5);
            Ok((Embedding::with_options(5, 3, 1.0, options, vb)?, vb.mesh().clone()))
        });
        type Table = (Embedding, DeviceMesh);
        let lookup = |(table, mesh): &Table, xs: &[Value], _: &Ctx| {
            let ids = DTensor::distribute(xs[0].tensor()?, mesh, &[Replicate])?;
            Ok(table.forward(&ids)?.into())
        };
        let h = g.call_with(table, "lookup", lookup, [ids]);
        g.split();
        let head = |(table, _): &Table, xs: &[Value], _: &Ctx| {
            Ok(xs[0].dtensor()?.linear(table.weight(), None)?.into())
        };
        let y = g.call_with(table, "head", head, [h]);
        g.loss_fn(|xs, _| Ok(xs[0].dtensor()?.sqr()?.mean_all()?.full_tensor()?), [y], LossReduction::Mean);
        let mesh = ctx.mesh(&[("pp", 2), ("tp", 1)])?;
        let vb = MeshVarBuilder::fresh(1, &mesh.axis("tp")?, Plan::new("tp"), DType::F64, &device())?;
        let schedule = ScheduleKind::OneFOneB.schedule(2, 1, 1)?;
        let pipe = g.finish(SplitSpec::declared())?;
        let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &device())?;
        let ids = Tensor::new(&[0u32, 4, 4], &device())?;
        let batch = split_args_kwargs_into_chunks(&[ids.into()], &Kwargs::new(), 1, None, None)?;
        Ok(runtime.forward_backward(&batch, &StepOptions::default()).unwrap_err().to_string())
    });
    texts.iter().for_each(|text| assert!(text.contains("rows of \"table\" in place"), "{text}"));
}

/// Small frozen parameters of the same ranks cost two calls a step, however many modules they are in.
#[test]
fn modules_of_the_same_ranks_are_compared_at_once() {
    let calls = |modules: usize| {
        on_ranks(2, &format!("{modules} modules"), move |ctx| -> Result<usize> {
            let mut g = PipeBuilder::<Vb>::new();
            let mut h = g.input("x", In::Arg);
            let frozen = |vb: &Vb| {
                let scale = vb.get_with_hints(3, "scale", candle_nn::Init::Const(2.0))?.detach();
                Ok(candle_pipe::stage_op(move |xs, _| {
                    Ok(vec![xs[0].tensor()?.broadcast_mul(&scale)?.into()])
                }))
            };
            let shared: Vec<_> =
                (0..modules).map(|i| g.shared_module(&format!("frozen.{i}"), frozen)).collect();
            for stage in 0..2 {
                for (i, &module) in shared.iter().enumerate() {
                    h = g.call(module, &format!("call.{stage}.{i}"), [h]);
                }
                h = g.module(&format!("linear.{stage}"), |vb| Ok(linear_no_bias(3, 3, vb.clone())?), [h]);
                if stage == 0 {
                    g.split();
                }
            }
            g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [h], LossReduction::Mean);
            let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F64, &device());
            let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
            let pipe = g.finish(SplitSpec::declared())?;
            let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &vb, &device())?;
            runtime.forward_backward(&batch(0)?, &StepOptions::default())?;
            let (step, counts) =
                comm::record(|| runtime.forward_backward(&batch(1)?, &StepOptions::default()));
            step?;
            Ok(counts.get(Op::AllGather).count)
        })
    };
    let (none, one, three) = (calls(0), calls(1), calls(3));
    assert!(one > none, "{one:?} and {none:?}");
    assert_eq!(three, one);
}
