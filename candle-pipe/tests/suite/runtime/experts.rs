//! The bias of a mixture of experts, which moves without a gradient, in stages and their replicas.
use candle_core::{DType, Tensor};
use candle_dist::{DataParallelOptions, DeviceMesh, RankContext};
use candle_pipe::microbatch::Microbatches;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    Ctx, In, Keep, LossReduction, Pipe, PipeBuilder, Result, Runtime, SplitSpec, StepOptions, Value,
    sharded_op,
};
use candle_shard::nn::{Linear, MeshVarBuilder, MoE, MoEConfig, Mode};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Shard};
use std::sync::{Arc, OnceLock};
use test_utils::{device, on_ranks};

const ROWS: usize = 24;
const STEPS: u64 = 4;

/// The layer of this rank, where its stage is here.
type Layer = Arc<OnceLock<Arc<MoE>>>;

/// A linear layer and a mixture in two stages; or the same mixture in both.
fn declare(layer: &Layer, shared: bool) -> Result<Pipe<MeshVarBuilder>> {
    let mut g = PipeBuilder::<MeshVarBuilder>::new();
    let x = g.input("x", In::Arg);
    let slot = layer.clone();
    let experts = g.shared_module("moe", move |vb: &MeshVarBuilder| {
        let layer = Arc::new(MoE::new(MoEConfig::new(4, 3, 5, 2).bias(true), vb)?);
        Ok((slot.get_or_init(|| layer).clone(), vb.mesh().clone()))
    });
    let run = |(layer, mesh): &(Arc<MoE>, DeviceMesh), xs: &[Value], _: &Ctx| {
        let x = match &xs[0] {
            Value::Tensor(x) => DTensor::distribute(x, mesh, &[Shard(0)])?,
            x => x.dtensor()?.clone(),
        };
        Ok(layer.forward(&x, Mode::Train { step: 0 })?.output.into())
    };
    let h = match shared {
        true => g.call_with(experts, "first", run, [x]),
        false => {
            let linear = |vb: &MeshVarBuilder| {
                let linear = Linear::new(4, 4, false, vb)?;
                Ok(sharded_op(vb.mesh(), move |x| linear.forward(x)))
            };
            g.module("linear", linear, [x])
        }
    };
    g.split();
    let y = g.call_with(experts, "second", run, [h]);
    g.loss_fn(|xs, _| Ok(xs[0].dtensor()?.sqr()?.mean_all()?.full_tensor()?), [y], LossReduction::Mean);
    g.finish(SplitSpec::declared())
}

/// The rows of replica `at` of `replicas`.
fn batch(step: u64, at: usize, replicas: usize, microbatches: usize) -> Result<Microbatches> {
    let x = Tensor::arange(0f64, (ROWS * 4) as f64, &device())?
        .affine(0.7, step as f64)?
        .sin()?
        .reshape((ROWS, 4))?;
    let mine = x.narrow(0, at * ROWS / replicas, ROWS / replicas)?.contiguous()?;
    Microbatches::cut(microbatches, [mine])
}

/// Returns the bias after each step, on the ranks that have it; replicas call `update_bias` with their group, or without one.
fn biases(ctx: &RankContext, sizes: [usize; 3], keep: Keep, summed: bool) -> Result<Vec<Vec<f64>>> {
    let [stages, replicas, experts] = sizes;
    let mesh = ctx.mesh(&[("pp", stages), ("dp", replicas), ("ep", experts)])?;
    let layer = Layer::default();
    let vb = MeshVarBuilder::fresh(1, &mesh.axis("ep")?, Plan::new("ep"), DType::F64, &device())?;
    let kind = if stages == 1 { ScheduleKind::LoopedBfs } else { ScheduleKind::OneFOneB };
    let schedule = kind.schedule(stages, 2, 2 / stages)?;
    let runtime = Runtime::new(&declare(&layer, false)?, &schedule, mesh.axis_group("pp")?, &vb, &device())?
        .with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
    let mut found = Vec::new();
    for step in 0..STEPS {
        let options = StepOptions::default().step(step).keep(keep);
        runtime.forward_backward(&batch(step, mesh.local_rank("dp")?, replicas, 2)?, &options)?;
        let Some(layer) = layer.get() else { continue };
        let named = runtime.named_vars()?.into_iter().find(|(name, _)| name.ends_with("router.bias"));
        found.push(named.unwrap().1.to_vec1::<f64>()?);
        let group = mesh.axis_group("dp")?;
        layer.update_bias(0.125, summed.then_some(group))?;
    }
    Ok(found)
}

#[test]
fn the_bias_of_experts_moves_as_on_one_device() {
    let one = on_ranks(1, "one device", |ctx| biases(ctx, [1, 1, 1], Keep::Activations, true));
    assert!(one[0].iter().flatten().any(|x| *x != 0.0), "{one:?}");
    for sizes in [[1, 2, 1], [2, 1, 1], [2, 2, 1], [1, 1, 3], [2, 1, 2]] {
        for keep in [Keep::Activations, Keep::Inputs] {
            let label = format!("{sizes:?} {keep:?}");
            let ranks = on_ranks(sizes.iter().product(), &label, move |ctx| biases(ctx, sizes, keep, true));
            let found: Vec<_> = ranks.iter().filter(|found| !found.is_empty()).collect();
            assert_eq!(found.len(), sizes[1] * sizes[2], "{label}");
            found.iter().for_each(|found| assert_eq!(**found, one[0], "{label}"));
        }
    }
}

/// The counts are those of one replica, and the first one's bias is that of all after the next step.
#[test]
fn a_bias_that_replicas_move_alone_is_that_of_the_first_one() {
    let found = on_ranks(2, "alone", |ctx| biases(ctx, [1, 2, 1], Keep::Activations, false));
    assert_eq!(found[0], found[1]);
}

#[test]
fn a_bias_that_the_ranks_of_a_shared_layer_move_unlike_is_refused_by_all() {
    let texts = on_ranks(2, "shared", |ctx| -> Result<String> {
        let mesh = ctx.mesh(&[("pp", 2), ("ep", 1)])?;
        let layer = Layer::default();
        let vb = MeshVarBuilder::fresh(1, &mesh.axis("ep")?, Plan::new("ep"), DType::F64, &device())?;
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        let runtime =
            Runtime::new(&declare(&layer, true)?, &schedule, mesh.axis_group("pp")?, &vb, &device())?;
        runtime.forward_backward(&batch(0, 0, 1, 2)?, &StepOptions::default())?;
        layer.get().unwrap().update_bias([0.1, 0.2][ctx.rank()], None)?;
        Ok(runtime.forward_backward(&batch(1, 0, 1, 2)?, &StepOptions::default()).unwrap_err().to_string())
    });
    texts
        .iter()
        .for_each(|text| assert!(text.contains("\"moe\" is on several ranks, and its copies"), "{text}"));
}
