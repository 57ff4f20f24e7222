//! Pipelines whose parameters are frozen at first: another runtime of the same parameters trains them.
use crate::runtime::model::numbers;
use crate::runtime::parity::close;
use candle_core::{DType, Tensor};
use candle_dist::{DataParallelOptions, RankContext};
use candle_nn::ParamsAdamW;
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    EqualCount, In, Kwargs, LossReduction, Pipe, PipeBuilder, Result, Runtime, StepOptions, sharded_op,
};
use candle_shard::nn::{AdamW, Linear, MeshVarBuilder, ParamGroup, Parameter, Parameters};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, checkpoint};
use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use test_utils::{Scratch, device, on_ranks};

/// What is frozen in each phase: a whole stage or nothing of it, a module that two stages share.
const PHASES: [&[&str]; 3] = [&["tied", "layers.0", "layers.3.down"], &[], &["tied", "layers.2"]];

fn is_frozen(phase: usize, name: &str) -> bool {
    PHASES[phase].iter().any(|frozen| name.starts_with(frozen))
}

fn declare(stages: usize, phase: usize) -> Result<Pipe<MeshVarBuilder>> {
    let of =
        move |vb: &MeshVarBuilder, name: &str| if is_frozen(phase, name) { vb.frozen() } else { vb.clone() };
    let mut g = PipeBuilder::<MeshVarBuilder>::new();
    let mut h = g.input("x", In::Arg);
    let tied = g.shared_module("tied", move |vb| {
        let layer = Linear::new(4, 4, false, &of(vb, "tied"))?;
        Ok(sharded_op(vb.mesh(), move |x| layer.forward(x)?.tanh()))
    });
    h = g.call(tied, "first", [h]);
    for i in 0..4 {
        let layer = move |vb: &MeshVarBuilder| {
            let at = |part: &str| of(vb, &format!("layers.{i}.{part}")).pp(part);
            let (up, down) = (Linear::new(4, 5, true, &at("up"))?, Linear::new(5, 4, true, &at("down"))?);
            Ok(sharded_op(vb.mesh(), move |x| down.forward(&up.forward(x)?.tanh()?)))
        };
        h = g.module(&format!("layers.{i}"), layer, [h]);
    }
    h = g.call(tied, "last", [h]);
    g.loss_fn(|xs, _| Ok(xs[0].dtensor()?.sqr()?.mean_all()?.full_tensor()?), [h], LossReduction::Mean);
    g.finish(EqualCount(stages))
}

type Values = BTreeMap<String, Vec<f64>>;

/// Returns the whole parameters of this rank's stages after all phases, or after the first one, which it saves.
fn train(
    ctx: &RankContext,
    [pp, dp, tp]: [usize; 3],
    load: Option<&Path>,
    save: Option<&Path>,
) -> Result<Values> {
    let mesh = ctx.mesh(&[("pp", pp), ("dp", dp), ("tp", tp)])?;
    let plan = Plan::new("tp")
        .with("layers.*.up", ColwiseParallel::default())
        .with("layers.*.down", RowwiseParallel::default());
    let vb = MeshVarBuilder::fresh(5, &mesh.axis("tp")?, plan, DType::F64, &device())?;
    let group = |of: &Parameters| ParamGroup::new(of, ParamsAdamW { lr: 0.05, ..Default::default() });
    let mut optimizer = AdamW::from_groups([group(&Parameters::default())])?;
    let begin = usize::from(load.is_some());
    let rows = 6 / dp;
    for phase in begin..if save.is_some() { 1 } else { PHASES.len() } {
        let schedule = ScheduleKind::OneFOneB.schedule(pp, 2, 1)?;
        let runtime = Runtime::new(&declare(pp, phase)?, &schedule, mesh.axis_group("pp")?, &vb, &device())?;
        let runtime = runtime.with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
        let parameters = vb.built();
        let was_trained = |p: &Parameter| (0..phase).any(|of| !is_frozen(of, &p.name));
        if let (true, Some(path)) = (phase == begin, load) {
            parameters.load(path)?;
            let (before, added) = parameters.partition(was_trained);
            optimizer = AdamW::from_groups([group(&before), group(&added)])?;
            let lacking = optimizer.load_partial(path)?;
            assert_eq!(
                lacking,
                added.iter().filter(|p| !p.is_frozen()).map(|p| p.name.clone()).collect::<Vec<_>>()
            );
        } else {
            optimizer.add_group(group(
                &parameters.partition(|p| !was_trained(p) && !is_frozen(phase, &p.name)).0,
            ))?;
        }
        for step in 2 * phase..2 * phase + 2 {
            let x = Tensor::arange(0f64, 24., &device())?.affine(0.7, step as f64)?.sin()?.reshape((6, 4))?;
            let x = x.narrow(0, rows * mesh.local_rank("dp")?, rows)?.contiguous()?;
            let batch = split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), 2, None, None)?;
            let mut made = runtime.forward_backward(&batch, &StepOptions::default())?.step;
            parameters.reduce(&mut made.grads)?;
            for p in parameters.iter() {
                let is_none = made.grads.get(&p.var).is_none();
                assert_eq!(is_none, is_frozen(phase, &p.name), "{} in phase {phase}", p.name);
            }
            let clip = runtime.clip_grad_norm(parameters.clip_grad_norm(0.1)?);
            clip.clip(&parameters.named_vars(), &mut made.grads)?;
            optimizer.step(&made.grads)?;
        }
    }
    let parameters = vb.built();
    if let Some(path) = save {
        checkpoint::save_stages(
            path,
            mesh.group()?,
            &[parameters.named_tensors(), optimizer.state()?].concat(),
        )?;
    }
    let whole = |p: &Parameter| {
        let whole = DTensor::from_local_with_spec(p.var.as_detached_tensor(), p.tensor.spec().clone())?;
        Ok((p.name.clone(), numbers(&whole.full_tensor()?)?))
    };
    parameters.iter().map(whole).collect()
}

#[test]
fn a_pipeline_unfreezes_what_another_runtime_has_frozen() {
    let want = Arc::new(on_ranks(1, "alone", |ctx| train(ctx, [1, 1, 1], None, None)).swap_remove(0));
    assert_eq!(want.len(), 17);
    for sizes in [[2, 1, 1], [3, 1, 1], [1, 2, 1], [1, 1, 2], [2, 2, 1], [2, 1, 2]] {
        let (shared, label) = (want.clone(), format!("{sizes:?}"));
        on_ranks(sizes.iter().product(), &label, move |ctx| -> Result<()> {
            for (name, got) in &train(ctx, sizes, None, None)? {
                close(got, &shared[name], 1e-9, &format!("{sizes:?}: {name}"));
            }
            Ok(())
        });
    }
    for (from, to) in [([2, 1, 2], [1, 1, 1]), ([1, 1, 1], [3, 1, 1]), ([3, 1, 1], [2, 1, 2])] {
        let folder = Scratch::of_ranks("unfreeze-pipeline");
        let path = folder.path("saved");
        let at = path.clone();
        on_ranks(from.iter().product(), "save", move |ctx| train(ctx, from, None, Some(&at)));
        let shared = want.clone();
        on_ranks(to.iter().product(), "load", move |ctx| -> Result<()> {
            for (name, got) in &train(ctx, to, Some(&path), None)? {
                close(got, &shared[name], 1e-9, &format!("{from:?} to {to:?}: {name}"));
            }
            Ok(())
        });
    }
}
