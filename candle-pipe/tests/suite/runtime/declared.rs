//! Declared parameters of a mesh: nodes get them with their layout.
use crate::runtime::model::numbers;
use crate::runtime::parity::close;
use candle_core::{DType, Tensor};
use candle_dist::{DataParallelOptions, RankContext};
use candle_pipe::graph::Share;
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    EqualCount, In, Kwargs, LossReduction, PipeBuilder, RankStep, Result, Runtime, StepOptions, Value,
};
use candle_shard::fsdp::FullyShardOptions;
use candle_shard::nn::{Init, MeshVarBuilder};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Placement, Replicate, Shard};
use test_utils::{device, on_ranks};

/// How nodes get the parameter.
#[derive(Debug, Clone, Copy)]
enum As {
    DTensor,
    /// This rank's part, plain.
    Part,
    Cast,
    View,
}

/// Two stages that multiply by one parameter.
fn declare(share: Share, at: Placement, given: As) -> PipeBuilder<MeshVarBuilder> {
    let mut g = PipeBuilder::<MeshVarBuilder>::new();
    let x = g.input("x", In::Arg);
    let gain = move |vb: &MeshVarBuilder| -> Result<Value> {
        let gain = vb.get(4, "gain", Init::Const(1.5), at, false)?;
        Ok(match given {
            As::DTensor => gain.into(),
            As::Part => gain.to_local().into(),
            As::Cast => gain.to_local().to_dtype(DType::F32)?.to_dtype(DType::F64)?.into(),
            As::View => gain.to_local().unsqueeze(0)?.squeeze(0)?.into(),
        })
    };
    let gain = g.parameter("gain", share, gain);
    let scale = |vb: &MeshVarBuilder| {
        let mesh = vb.mesh().clone();
        Ok(candle_pipe::stage_op(move |xs, _| {
            let rows: Vec<_> =
                mesh.names().iter().map(|name| if name == "fsdp" { Shard(0) } else { Replicate }).collect();
            let x = match &xs[0] {
                Value::Tensor(x) => DTensor::distribute(x, &mesh, &rows)?,
                x => x.on(&mesh)?,
            };
            Ok(vec![x.mul(&xs[1].on(&mesh)?)?.tanh()?.into()])
        }))
    };
    let h = g.module("first", scale, [x, gain]);
    let h = g.module("second", scale, [h, gain]);
    g.loss_fn(|xs, _| Ok(xs[0].dtensor()?.sqr()?.mean_all()?.full_tensor()?), [h], LossReduction::Mean);
    g
}

fn batch(first: usize, rows: usize) -> Result<Microbatches> {
    let x = Tensor::arange(0f64, 24., &device())?.affine(0.7, 0.3)?.sin()?.reshape((6, 4))?;
    split_args_kwargs_into_chunks(&[x.narrow(0, first, rows)?.into()], &Kwargs::new(), 2, None, None)
}

/// The whole gradient of the parameter, and the loss.
fn step(
    ctx: &RankContext,
    (share, at): (Share, Placement),
    sizes: [usize; 4],
    given: As,
) -> Result<(Option<Vec<f64>>, f64)> {
    let axes: Vec<(&str, usize)> = ["pp", "dp", "fsdp", "tp"].into_iter().zip(sizes).collect();
    let mesh = ctx.mesh(&axes)?;
    let vb = MeshVarBuilder::fresh(5, &mesh.axes(&["fsdp", "tp"])?, Plan::new("tp"), DType::F64, &device())?;
    let vb = vb.fully_shard("fsdp", FullyShardOptions::default())?;
    let schedule = ScheduleKind::OneFOneB.schedule(sizes[0], 2, 1)?;
    let pipe = declare(share, at, given).finish(EqualCount(sizes[0]))?;
    let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &device())?;
    let (replica, parameters) = (mesh.local_rank("dp")?, vb.built());
    // Unlike numbers of rows.
    let (runtime, batch) = match sizes[1] {
        1 => (runtime, batch(0, 6)?),
        _ => {
            let runtime = runtime.with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
            (runtime, batch(replica * 4, if replica == 0 { 4 } else { 2 })?)
        }
    };
    let mut made = runtime.forward_backward(&batch, &StepOptions::default())?;
    let loss = runtime.loss(&made)?;
    parameters.reduce(&mut made.step.grads)?;
    let grad = parameters.iter().find_map(|p| p.grad(&made.step.grads).transpose()).transpose()?;
    let whole = |grad: DTensor| numbers(&grad.full_tensor()?);
    Ok((grad.map(whole).transpose()?, loss))
}

#[test]
fn nodes_get_declared_parameters_of_any_layout() {
    for (share, at) in [
        (Share::Transmit, Replicate),
        (Share::Replicate, Replicate),
        (Share::Transmit, Shard(0)),
        (Share::Replicate, Shard(0)),
    ] {
        let (want, loss) =
            on_ranks(1, "alone", move |ctx| step(ctx, (share, at), [1; 4], As::DTensor)).swap_remove(0);
        let want = want.expect("a gradient");
        for sizes in [[1, 1, 2, 1], [2, 1, 2, 1], [2, 1, 1, 2], [1, 2, 1, 2], [2, 2, 2, 1]] {
            let label = format!("{share:?} {at} {sizes:?}");
            let made = on_ranks(sizes.iter().product(), &label, move |ctx| {
                step(ctx, (share, at), sizes, As::DTensor)
            });
            assert!(made.iter().any(|(grad, _)| grad.is_some()), "{label}");
            for (grad, everywhere) in made {
                assert!((everywhere - loss).abs() < 1e-12, "{label}: {everywhere} is not {loss}");
                grad.iter().for_each(|grad| close(grad, &want, 1e-12, &label));
            }
        }
    }
}

#[test]
fn parts_of_declared_parameters_are_refused_by_all() {
    for (at, sizes, want) in [
        (Replicate, [2, 1, 2, 1], "each rank of \"fsdp\" finds a part of its gradient"),
        (Shard(0), [2, 1, 1, 2], "each rank of \"tp\" has a part of it"),
    ] {
        for given in [As::Part, As::Cast, As::View] {
            let texts = on_ranks(sizes.iter().product(), "parts", move |ctx| {
                Ok::<_, String>(step(ctx, (Share::Replicate, at), sizes, given).unwrap_err().to_string())
            });
            for text in texts {
                assert!(text.contains("parameter \"gain\"") && text.contains(want), "{given:?}: {text}");
            }
        }
    }
    on_ranks(2, "whole", |ctx| step(ctx, (Share::Transmit, Replicate), [2, 1, 1, 1], As::Cast));
}

/// A copy whose ranks have no loss does not leave the others without an answer, or with NaN.
#[test]
fn a_loss_that_no_rank_has_is_refused_by_the_ranks_of_all_copies() {
    for lacking in [0, 1] {
        let texts = on_ranks(4, "no loss", move |ctx| -> Result<String> {
            let mesh = ctx.mesh(&[("pp", 2), ("dp", 2), ("tp", 1)])?;
            let vb = MeshVarBuilder::fresh(5, &mesh.axis("tp")?, Plan::new("tp"), DType::F64, &device())?;
            let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
            let pipe = declare(Share::Transmit, Replicate, As::DTensor).finish(EqualCount(2))?;
            let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &device())?
                .with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
            let replica = mesh.local_rank("dp")?;
            let made = runtime.forward_backward(&batch(replica * 3, 3)?, &StepOptions::default())?;
            let none = RankStep::default();
            let refused =
                runtime.loss(if replica == lacking { &none } else { &made }).unwrap_err().to_string();
            // All can go on.
            assert!(runtime.loss(&made)?.is_finite());
            Ok(refused)
        });
        texts.iter().for_each(|text| assert!(text.contains("or no rank has one"), "{text}"));
    }
}
