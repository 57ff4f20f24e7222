//! Pipelines that are saved, and go on with another number of stages.
use crate::runtime::model::numbers;
use crate::runtime::parity::close;
use candle_core::{DType, Tensor};
use candle_dist::RankContext;
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    EqualCount, In, Kwargs, LossReduction, Pipe, PipeBuilder, Result, Runtime, StepOptions, sharded_op,
};
use candle_shard::nn::{AdamW, Linear, MeshVarBuilder, ParamGroup};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate, checkpoint};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use test_utils::{Scratch, device, on_ranks};

/// Four layers with a cut behind each two, and a module that the first and the last stage share.
fn declare(stages: usize) -> Result<Pipe<MeshVarBuilder>> {
    let mut g = PipeBuilder::<MeshVarBuilder>::new();
    let mut h = g.input("x", In::Arg);
    let tied = g.shared_module("tied", |vb| {
        let layer = Linear::new(4, 4, false, vb)?;
        Ok(sharded_op(vb.mesh(), move |x| layer.forward(x)?.tanh()))
    });
    h = g.call(tied, "first", [h]);
    for i in 0..4 {
        let layer = move |vb: &MeshVarBuilder| {
            let (up, down) =
                (Linear::new(4, 5, true, &vb.pp("up"))?, Linear::new(5, 4, true, &vb.pp("down"))?);
            Ok(sharded_op(vb.mesh(), move |x| down.forward(&up.forward(x)?.tanh()?)))
        };
        h = g.module(&format!("layers.{i}"), layer, [h]);
    }
    h = g.call(tied, "last", [h]);
    g.loss_fn(|xs, _| Ok(xs[0].dtensor()?.sqr()?.mean_all()?.full_tensor()?), [h], LossReduction::Mean);
    g.finish(EqualCount(stages))
}

fn batch(step: usize) -> Result<Microbatches> {
    let x = Tensor::arange(0f64, 24., &device())?.affine(0.7, step as f64)?.sin()?.reshape((6, 4))?;
    split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), 2, None, None)
}

type Values = BTreeMap<String, Vec<f64>>;

/// Trains from a checkpoint to another; returns the whole parameters of this rank's stages.
fn train(
    ctx: &RankContext,
    [pp, tp]: [usize; 2],
    steps: std::ops::Range<usize>,
    load: Option<&Path>,
    save: Option<&Path>,
) -> Result<Values> {
    let mesh = ctx.mesh(&[("pp", pp), ("tp", tp)])?;
    let plan = Plan::new("tp")
        .with("layers.*.up", ColwiseParallel::default())
        .with("layers.*.down", RowwiseParallel::default());
    let vb = MeshVarBuilder::fresh(5, &mesh.axis("tp")?, plan, DType::F64, &device())?;
    let schedule = ScheduleKind::OneFOneB.schedule(pp, 2, 1)?;
    let runtime = Runtime::new(&declare(pp)?, &schedule, mesh.axis_group("pp")?, &vb, &device())?;
    let parameters = runtime.parameters()?;
    // Those that go on have the learning rates and options of the checkpoint, whatever they are made with.
    let lr = if load.is_some() { 0.5 } else { 0.05 };
    let (decay, no_decay) = parameters.split_decay();
    let group = |of, weight_decay| {
        ParamGroup::new(of, candle_nn::ParamsAdamW { lr, weight_decay, ..Default::default() })
    };
    let mut optimizer = AdamW::from_groups([group(&decay, lr), group(&no_decay, 0.0)])?;
    if let Some(path) = load {
        parameters.load(path)?;
        optimizer.load(path)?;
        // A group without parameters on this stage has nothing to load.
        let rates = optimizer.learning_rates();
        assert!(
            rates.iter().zip([&decay, &no_decay]).all(|(&lr, of)| of.is_empty() || lr == 0.05),
            "{rates:?}"
        );
    }
    for step in steps {
        let mut made = runtime.forward_backward(&batch(step)?, &StepOptions::default())?.step;
        parameters.reduce(&mut made.grads)?;
        optimizer.step(&made.grads)?;
    }
    if let Some(path) = save {
        checkpoint::save_stages(
            path,
            mesh.group()?,
            &[parameters.named_tensors(), optimizer.state()?].concat(),
        )?;
    }
    let whole = |p: &candle_shard::nn::Parameter| {
        let whole = DTensor::from_local_with_spec(p.var.as_detached_tensor(), p.tensor.spec().clone())?;
        Ok((p.name.clone(), numbers(&whole.redistribute(&[Replicate])?.full_tensor()?)?))
    };
    parameters.iter().map(whole).collect()
}

#[test]
fn a_saved_pipeline_goes_on_with_any_number_of_stages() {
    let want = on_ranks(1, "alone", |ctx| train(ctx, [1, 1], 0..6, None, None)).swap_remove(0);
    assert_eq!(want.len(), 17);
    let want = Arc::new(want);
    for (from, to) in
        [([2, 2], [1, 1]), ([1, 1], [3, 1]), ([3, 1], [2, 2]), ([2, 1], [4, 1]), ([2, 2], [1, 3])]
    {
        let folder = Scratch::of_ranks("pipeline");
        let path: PathBuf = folder.path("saved");
        let at = path.clone();
        on_ranks(from[0] * from[1], "save", move |ctx| train(ctx, from, 0..3, None, Some(&at)));
        let want = want.clone();
        on_ranks(to[0] * to[1], "load", move |ctx| -> Result<()> {
            let got = train(ctx, to, 3..6, Some(&path), None)?;
            for (name, got) in &got {
                close(got, &want[name], 1e-12, &format!("{from:?} to {to:?}: {name}"));
            }
            Ok(())
        });
    }
}
