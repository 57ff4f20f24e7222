//! Stages of sharded layers in 16 bits, with plain and sharded tensors between them, against the uncut model.
use crate::runtime::parity::close;
use candle_core::backprop::GradStore;
use candle_core::{DType, Tensor};
use candle_dist::DeviceMesh;
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    EqualCount, In, Keep, Kwargs, LocalPipe, LossReduction, PipeBuilder, Result, Runtime, StepOptions, Value,
    stage_op,
};
use candle_shard::nn::{LayerNorm, Linear, MeshVarBuilder, recompute};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use std::collections::BTreeMap;
use test_utils::{device, on_ranks};

type Figures = BTreeMap<String, Vec<f64>>;

/// Blocks with skips over all of them; `is_plain` says what is between them.
fn declare(is_plain: bool, is_recomputed: bool) -> PipeBuilder<MeshVarBuilder> {
    let mut g = PipeBuilder::<MeshVarBuilder>::new();
    let x = g.input("x", In::Arg);
    let mut h = x;
    let mut all = Vec::new();
    for i in 0..4 {
        let build = move |vb: &MeshVarBuilder| {
            let (up, down) =
                (Linear::new(4, 6, true, &vb.pp("up"))?, Linear::new(6, 4, true, &vb.pp("down"))?);
            let (norm, mesh) = (LayerNorm::new(4, 1e-5, &vb.pp("norm"))?, vb.mesh().clone());
            Ok(stage_op(move |xs, _| {
                let x = xs[0].on(&mesh)?;
                let (up, down, norm) = (up.clone(), down.clone(), norm.clone());
                // Its input is used by a layer whose input has a part of its gradient on each rank.
                let block = move |x: &candle_shard::DTensor| {
                    norm.forward(&down.forward(&up.forward(x)?.gelu()?)?.add(x)?)
                };
                let y = if is_recomputed { recompute(&x, block)? } else { block(&x)? };
                Ok(vec![if is_plain { y.full_tensor()?.into() } else { y.into() }])
            }))
        };
        h = g.module(&format!("blocks.{i}"), build, [h]);
        all.push(h);
    }
    let sum = |xs: &[Value], _: &candle_pipe::Ctx| {
        let mut sum = xs[0].full_tensor()?;
        for x in &xs[1..] {
            sum = (sum + x.full_tensor()?)?;
        }
        Ok(sum.into())
    };
    let y = g.func("sum", sum, all);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
    g
}

fn builder(mesh: &DeviceMesh, dtype: DType) -> Result<MeshVarBuilder> {
    let plan = Plan::new("tp")
        .with("*.*.up", ColwiseParallel::default())
        .with("*.*.down", RowwiseParallel::default());
    Ok(MeshVarBuilder::fresh(5, mesh, plan, dtype, &device())?)
}

fn batch(dtype: DType) -> Result<Microbatches> {
    let x =
        Tensor::arange(0f64, 24., &device())?.affine(0.7, 0.3)?.sin()?.reshape((6, 4))?.to_dtype(dtype)?;
    split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), 3, None, None)
}

fn gradients(vb: &MeshVarBuilder, grads: &mut GradStore) -> Result<Figures> {
    let parameters = vb.built();
    parameters.reduce(grads)?;
    let found = parameters.iter().filter_map(|p| Some((p.name.clone(), p.grad(grads).transpose()?)));
    found
        .map(|(name, grad)| Ok((name, grad?.full_tensor()?.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)))
        .collect()
}

fn uncut(dtype: DType, is_plain: bool) -> Figures {
    on_ranks(1, "uncut", move |ctx| -> Result<Figures> {
        let vb = builder(&ctx.mesh(&[("tp", 1)])?, dtype)?;
        let local = LocalPipe::new(&declare(is_plain, false).finish(EqualCount(1))?, &vb, &device())?;
        gradients(&vb, &mut local.forward_backward(&batch(dtype)?, &StepOptions::default())?.grads)
    })
    .swap_remove(0)
}

fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F32 => 1e-5,
        DType::F16 => 5e-3,
        _ => 4e-2,
    }
}

#[test]
fn stages_in_16_bits_train_as_the_uncut_model() {
    for dtype in [DType::F32, DType::BF16, DType::F16] {
        for is_plain in [true, false] {
            let want = uncut(dtype, is_plain);
            for (tp, stages, is_recomputed) in [(1, 2, false), (2, 3, false), (3, 5, true), (2, 4, true)] {
                let label = format!("{dtype:?}, tp {tp}, {stages} stages, plain {is_plain}, {is_recomputed}");
                let want = want.clone();
                on_ranks(tp, &label.clone(), move |ctx| -> Result<()> {
                    let vb = builder(&ctx.mesh(&[("tp", tp)])?, dtype)?;
                    let pipe = declare(is_plain, is_recomputed).finish(EqualCount(stages))?;
                    let local = LocalPipe::new(&pipe, &vb, &device())?;
                    for keep in [Keep::Activations, Keep::Inputs] {
                        let options = StepOptions::default().keep(keep);
                        let found =
                            gradients(&vb, &mut local.forward_backward(&batch(dtype)?, &options)?.grads)?;
                        assert_eq!(found.len(), want.len());
                        found.iter().for_each(|(name, got)| close(got, &want[name], tolerance(dtype), name));
                    }
                    Ok(())
                });
            }
        }
    }
}

#[test]
fn stages_in_16_bits_on_ranks_train_as_the_uncut_model() {
    for (dtype, is_plain) in [(DType::BF16, true), (DType::F16, true), (DType::BF16, false)] {
        let want = uncut(dtype, is_plain);
        for (pp, tp, kind, per_rank) in [
            (2, 2, ScheduleKind::OneFOneB, 1),
            (3, 1, ScheduleKind::ZbH1, 1),
            (2, 1, ScheduleKind::Interleaved1F1B, 2),
        ] {
            let (want, label) =
                (want.clone(), format!("{dtype:?}, {kind}, pp {pp}, tp {tp}, plain {is_plain}"));
            on_ranks(pp * tp, &label.clone(), move |ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("pp", pp), ("tp", tp)])?;
                let microbatches = if per_rank == 1 { 3 } else { 4 };
                let (vb, schedule) =
                    (builder(&mesh.axis("tp")?, dtype)?, kind.schedule(pp, microbatches, per_rank)?);
                let pipe = declare(is_plain, per_rank == 2).finish(EqualCount(schedule.stages()))?;
                let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &device())?;
                let x = Tensor::arange(0f64, 24., &device())?.affine(0.7, 0.3)?.sin()?.reshape((6, 4))?;
                let args = [x.to_dtype(dtype)?.into()];
                let batch = split_args_kwargs_into_chunks(&args, &Kwargs::new(), microbatches, None, None)?;
                let mut step = runtime.forward_backward(&batch, &StepOptions::default())?.step;
                let found = gradients(&vb, &mut step.grads)?;
                found.iter().for_each(|(name, got)| close(got, &want[name], tolerance(dtype), &label));
                Ok(())
            });
        }
    }
}
