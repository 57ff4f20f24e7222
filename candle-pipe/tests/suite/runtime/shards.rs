//! Parameters that are cut over an axis: nothing takes the shards for copies, or a part of the norm for all of it.
use crate::runtime::model::numbers;
use candle_core::{DType, Tensor, Var};
use candle_dist::{
    ClipGradNorm, DataParallel, DataParallelOptions, DeviceMesh, InitialSync, RankContext, SyncOptions,
    sync_params, verify_parameter_shapes,
};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    In, Kwargs, LocalPipe, LossReduction, Pipe, PipeBuilder, Result, Runtime, SplitSpec, StepOptions,
    sharded_op,
};
use candle_shard::fsdp::{FullyShard, FullyShardOptions, no_sync};
use candle_shard::nn::{Linear, MeshVarBuilder, Parameters};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use test_utils::{device, on_ranks};

/// Two stages. Only the first has layers that are cut: a unit, or a pair of linear layers.
fn declare(stages: usize) -> Result<Pipe<MeshVarBuilder>> {
    let mut g = PipeBuilder::<MeshVarBuilder>::new();
    let mut h = g.input("x", In::Arg);
    let first = |vb: &MeshVarBuilder| {
        let block = FullyShard::new(vb, |vb| {
            Ok((Linear::new(4, 6, true, &vb.pp("up"))?, Linear::new(6, 4, true, &vb.frozen().pp("down"))?))
        })?;
        Ok(sharded_op(vb.mesh(), move |x| block.run(|(up, down)| down.forward(&up.forward(x)?.tanh()?))))
    };
    h = g.module("first", first, [h]);
    if stages == 2 {
        g.split();
    }
    let last = |vb: &MeshVarBuilder| {
        let linear = Linear::new(4, 4, true, vb)?;
        Ok(sharded_op(vb.mesh(), move |x| linear.forward(x)))
    };
    h = g.module("last", last, [h]);
    g.loss_fn(|xs, _| Ok(xs[0].dtensor()?.sqr()?.mean_all()?.full_tensor()?), [h], LossReduction::Mean);
    g.finish(SplitSpec::declared())
}

fn builder(mesh: &DeviceMesh, fully: Option<&str>) -> Result<MeshVarBuilder> {
    let plan = Plan::new("tp")
        .with("first.up", ColwiseParallel::default())
        .with("first.down", RowwiseParallel::default());
    let vb = MeshVarBuilder::fresh(5, mesh, plan, DType::F64, &device())?;
    Ok(match fully {
        Some(axis) => vb.fully_shard(axis, FullyShardOptions::default())?,
        None => vb,
    })
}

fn batch() -> Result<Microbatches> {
    let x = Tensor::arange(0f64, 24., &device())?.affine(0.7, 0.3)?.sin()?.reshape((6, 4))?;
    split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), 2, None, None)
}

fn values(parameters: &Parameters) -> Result<Vec<Vec<f64>>> {
    parameters.iter().map(|p| numbers(&p.var)).collect()
}

#[test]
fn replicas_over_an_axis_that_cuts_parameters_are_refused_by_all() {
    for start in [InitialSync::Sync(SyncOptions::default()), InitialSync::Verify, InitialSync::Trust] {
        for (pp, over) in [(2, "fsdp"), (1, "fsdp"), (2, "tp"), (1, "tp")] {
            let (start, label) = (start.clone(), format!("{pp} stages, over {over}, {start:?}"));
            let texts = on_ranks(pp * 8, &label, move |ctx| -> Result<String> {
                let mesh = ctx.mesh(&[("pp", pp), ("dp", 2), ("fsdp", 2), ("tp", 2)])?;
                let stage = mesh.axes(&["fsdp", "tp"])?;
                let schedule = ScheduleKind::OneFOneB.schedule(pp, 2, 1)?;
                let build = |vb: &MeshVarBuilder| {
                    Runtime::new(&declare(pp)?, &schedule, mesh.axis_group("pp")?, vb, &device())
                };
                let vb = builder(&stage, Some("fsdp"))?;
                let runtime = build(&vb)?;
                let before = values(&vb.built())?;
                let options = DataParallelOptions::default().start(start.clone());
                let refused = runtime.with_replicas(mesh.axis_group(over)?, &options).map(drop).unwrap_err();
                assert_eq!(values(&vb.built())?, before, "nothing has changed");
                // All can go on, over an axis that cuts nothing.
                let vb = builder(&stage, Some("fsdp"))?;
                build(&vb)?.with_replicas(mesh.axis_group("dp")?, &options)?;
                Ok(refused.to_string())
            });
            for text in texts {
                assert!(
                    text.contains("\"first.") && text.contains("is a shard, and ranks ["),
                    "{label}: {text}"
                );
            }
        }
    }
}

/// A pipeline to train and one to evaluate, with other schedules, and all stages in one process.
#[test]
fn several_pipelines_of_one_builder_have_the_same_variables() {
    for (fully, tp) in [(None, 1), (None, 2), (Some("fsdp"), 2)] {
        on_ranks(2 * 2 * tp, &format!("{fully:?}, tp {tp}"), move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("pp", 2), ("fsdp", 2), ("tp", tp)])?;
            let stage = mesh.axes(&["fsdp", "tp"])?;
            let vb = builder(&stage, fully)?;
            let build = |kind: ScheduleKind, microbatches| {
                let schedule = kind.schedule(2, microbatches, 1)?;
                Runtime::new(&declare(2)?, &schedule, mesh.axis_group("pp")?, &vb, &device())
            };
            let first = build(ScheduleKind::OneFOneB, 2)?;
            let count = vb.built().len();
            let second = build(ScheduleKind::GPipe, 2)?;
            assert_eq!(vb.built().len(), count, "no parameter twice");
            for _ in 0..2 {
                let mut found = Vec::new();
                for runtime in [&first, &second] {
                    let mut step = runtime.forward_backward(&batch()?, &StepOptions::default())?.step;
                    vb.built().reduce(&mut step.grads)?;
                    let grads = runtime
                        .named_vars()?
                        .into_iter()
                        .filter_map(|(_, var)| step.grads.get(&var).cloned());
                    found.push(grads.map(|grad| numbers(&grad)).collect::<Result<Vec<_>>>()?);
                }
                assert_eq!(found[0], found[1]);
                assert!(!found[0].is_empty());
                for (_, var) in first.named_vars()? {
                    var.set(&(var.as_tensor() * 0.9)?)?;
                }
            }
            // One that would be cut otherwise is refused.
            let other = builder(&stage, fully)?;
            let plain = PipeBuilder::<MeshVarBuilder>::new;
            let declare = |width: usize| {
                let mut g = plain();
                let x = g.input("x", In::Arg);
                let build = move |vb: &MeshVarBuilder| {
                    let up = Linear::new(4, width, true, &vb.pp("up"))?;
                    Ok(sharded_op(vb.mesh(), move |x| up.forward(x)))
                };
                let y = g.module("first", build, [x]);
                g.output("y", y);
                g.finish(SplitSpec::declared())
            };
            LocalPipe::new(&declare(6)?, &other, &device())?;
            let said = LocalPipe::new(&declare(8)?, &other, &device()).map(drop).unwrap_err().to_string();
            assert!(
                said.contains("first.up.weight is") && said.contains("in one model of this builder"),
                "{said}"
            );
            Ok(())
        });
    }
}

/// The same without a pipe.
#[test]
fn shards_are_neither_synced_nor_compared_nor_averaged_as_copies() {
    let texts = on_ranks(4, "no pipe", |ctx| -> Result<Vec<String>> {
        let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
        let (tp, dp) = (mesh.axis_group("tp")?, mesh.axis_group("dp")?);
        let vb = builder(&mesh.axis("tp")?, None)?;
        LocalPipe::new(&declare(1)?, &vb, &device())?;
        let vars = vb.built().named_vars();
        let before = values(&vb.built())?;
        let tensors: Vec<(&String, &Tensor)> =
            vars.iter().map(|(name, var)| (name, var.as_tensor())).collect();
        let ignored = SyncOptions::default().ignore(vars.iter().map(|(name, _)| name.clone()));
        let options = |start| DataParallelOptions::default().start(start);
        let mut refused = Vec::new();
        for group in [tp, ctx.group(), mesh.group()?] {
            refused.push(sync_params(group, &vars, &SyncOptions::default()));
            refused.push(verify_parameter_shapes(group, &tensors));
            for start in [InitialSync::Verify, InitialSync::Trust, InitialSync::Sync(ignored.clone())] {
                refused.push(DataParallel::new(group, &vars, &options(start)).map(drop));
            }
        }
        assert_eq!(values(&vb.built())?, before, "nothing has changed");
        for (name, var) in vars.iter().filter(|(name, _)| name.starts_with("last")) {
            sync_params(ctx.group(), &[(name, var.clone())], &SyncOptions::default())?;
        }
        verify_parameter_shapes(dp, &tensors)?;
        DataParallel::new(dp, &vars, &DataParallelOptions::default())?;
        // A variable that was made of a tensor by hand.
        let (_leaf, var) = vb.built().iter().next().unwrap().tensor.to_var()?;
        refused.push(sync_params(tp, &[("own", var)], &SyncOptions::default()));
        Ok(refused.into_iter().map(|refused| refused.unwrap_err().to_string()).collect())
    });
    for texts in &texts {
        assert_eq!(texts.len(), 16);
        texts.iter().for_each(|text| assert!(text.contains("is a shard, and ranks ["), "{text}"));
    }
}

fn clipped(
    ctx: &RankContext,
    pp: usize,
    clip: impl Fn(&Runtime, &Parameters, &DeviceMesh) -> Result<ClipGradNorm>,
    trained: bool,
) -> Result<(candle_dist::Result<f64>, Vec<String>)> {
    let mesh = ctx.mesh(&[("pp", pp), ("fsdp", 2), ("tp", 2)])?;
    let stage = mesh.axes(&["fsdp", "tp"])?;
    let schedule = ScheduleKind::OneFOneB.schedule(pp, 2, 1)?;
    let vb = builder(&stage, Some("fsdp"))?;
    let runtime = Runtime::new(&declare(pp)?, &schedule, mesh.axis_group("pp")?, &vb, &device())?;
    let parameters = vb.built();
    let mut step = runtime.forward_backward(&batch()?, &StepOptions::default())?.step;
    parameters.reduce(&mut step.grads)?;
    let is_listed = |name: &str| !trained || parameters.iter().any(|p| p.name == name && !p.is_frozen());
    let vars: Vec<(String, Var)> =
        runtime.named_vars()?.into_iter().filter(|(name, _)| is_listed(name)).collect();
    let clip = clip(&runtime, &parameters, &mesh)?;
    Ok((clip.clip(&vars, &mut step.grads), vars.into_iter().map(|(name, _)| name).collect()))
}

#[test]
fn a_norm_without_the_shards_of_other_ranks_is_refused_by_all() {
    for (pp, how) in [(2, "none"), (1, "none"), (2, "tp only"), (1, "tp only"), (1, "not in a pipe")] {
        let texts = on_ranks(pp * 4, how, move |ctx| -> Result<String> {
            let clip = |runtime: &Runtime, parameters: &Parameters, mesh: &DeviceMesh| {
                let clip = ClipGradNorm::new(1e-3);
                let cut = parameters
                    .iter()
                    .filter(|p| p.tensor.placements()[1].shard_dim().is_some() && !p.is_frozen());
                let names: Vec<String> = cut.map(|p| p.name.clone()).collect();
                Ok(match how {
                    "none" => runtime.clip_grad_norm(clip),
                    "tp only" if names.is_empty() => runtime.clip_grad_norm(clip),
                    "tp only" => runtime.clip_grad_norm(clip.sharded(mesh.axis_group("tp")?, names)),
                    _ => clip,
                })
            };
            let (norm, _) = clipped(ctx, pp, clip, false)?;
            Ok(norm.unwrap_err().to_string())
        });
        for text in &texts {
            assert!(
                text.contains("\"first.up.") && text.contains("the norm lacks the other shards"),
                "{how}: {text}"
            );
        }
        if how != "not in a pipe" {
            // A pipeline agrees on one text, whichever of its ranks has the shards.
            assert!(texts.iter().all(|text| text.contains("on ranks [")), "{texts:?}");
        }
    }
}

#[test]
fn a_norm_over_all_axes_is_that_of_one_device_with_and_without_frozen_parameters_in_the_list() {
    let norm = |pp: usize, world: usize, trained: bool| {
        on_ranks(world, &format!("{pp} stages, {trained}"), move |ctx| -> Result<f64> {
            if world == 1 {
                let mesh = ctx.mesh(&[("fsdp", 1), ("tp", 1)])?;
                let vb = builder(&mesh, None)?;
                let local = LocalPipe::new(&declare(1)?, &vb, &device())?;
                let mut step = local.forward_backward(&batch()?, &StepOptions::default())?;
                return Ok(vb
                    .built()
                    .clip_grad_norm(1e-3)?
                    .clip(&vb.built().named_vars(), &mut step.grads)?);
            }
            let all = |runtime: &Runtime, parameters: &Parameters, _: &DeviceMesh| {
                Ok(runtime.clip_grad_norm(parameters.clip_grad_norm(1e-3)?))
            };
            let (norm, names) = clipped(ctx, pp, all, trained)?;
            assert!(names.iter().all(|name| !trained || !name.contains("down")), "{names:?}");
            Ok(norm?)
        })
    };
    let want = norm(1, 1, false)[0];
    for (pp, trained) in [(1, false), (2, false), (1, true), (2, true)] {
        for got in norm(pp, pp * 4, trained) {
            assert!((got - want).abs() < 1e-12, "{pp} stages: {got} is not {want}");
        }
    }
}

/// A step scales gradients itself, which it cannot where units keep them.
#[test]
fn a_step_within_no_sync_is_refused_by_all() {
    for everywhere in [true, false] {
        let texts = on_ranks(4, "no_sync", move |ctx| -> Result<[String; 2]> {
            let mesh = ctx.mesh(&[("pp", 2), ("fsdp", 2), ("tp", 1)])?;
            let stage = mesh.axes(&["fsdp", "tp"])?;
            let (vb, local_vb) = (builder(&stage, Some("fsdp"))?, builder(&stage, Some("fsdp"))?);
            let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
            let runtime = Runtime::new(&declare(2)?, &schedule, mesh.axis_group("pp")?, &vb, &device())?;
            let batch = batch()?;
            let run = || runtime.forward_backward(&batch, &StepOptions::default()).map(drop);
            let refused = if everywhere || mesh.local_rank("pp")? == 1 { no_sync(run) } else { run() };
            // All can go on.
            run()?;
            let local = LocalPipe::new(&declare(1)?, &local_vb, &device())?;
            let alone = no_sync(|| local.forward_backward(&batch, &StepOptions::default()).map(drop));
            Ok([refused.unwrap_err().to_string(), alone.unwrap_err().to_string()])
        });
        for text in texts.iter().flatten() {
            assert!(text.contains("a training step of a pipeline within fsdp::no_sync"), "{text}");
        }
    }
}
