//! Mistakes of programs with pipelines, each with the error that names it: none is silent, and none hangs.
use crate::runtime::chain::{Tail, batch, pipe, runtime};
use candle_core::{DType, Device, Tensor};
use candle_dist::{RankContext, World};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::{Schedule, ScheduleKind};
use candle_pipe::{
    EqualCount, In, Kwargs, LossReduction, PipeBuilder, Result, Runtime, SplitSpec, StepOptions, nn,
    sharded_op,
};
use candle_shard::nn::{Linear, MeshVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::{DTensor, Replicate};
use std::sync::Arc;
use test_utils::mistakes::{of_the_world, on_all_ranks};

const RANKS: usize = 2;
const MICROBATCHES: usize = 4;

type Mistake = test_utils::mistakes::Mistake<candle_pipe::Error>;

fn plain() -> Tail {
    Arc::new(|_, _, y, _| Ok(y.clone()))
}

fn schedule() -> Result<Schedule> {
    ScheduleKind::OneFOneB.schedule(RANKS, MICROBATCHES, 1)
}

fn chain(ctx: &RankContext) -> Result<Runtime> {
    runtime(&schedule()?, ctx, &plain())
}

fn step(runtime: &Runtime, rows: usize, microbatches: usize) -> Result<candle_pipe::RankStep> {
    runtime.forward_backward(&batch(rows, microbatches)?, &StepOptions::default())
}

/// Two layers of these names, without a loss.
fn layers(names: [&str; 2]) -> PipeBuilder<candle_nn::VarBuilder<'static>> {
    let mut g = PipeBuilder::new();
    let mut h = g.input("x", In::Arg);
    for name in names {
        h = g.module(name, |vb: &candle_nn::VarBuilder<'static>| Ok(nn::linear(2, 2, vb.clone())?), [h]);
    }
    g.output("y", h);
    g
}

/// Two sharded blocks in two stages, with this plan and this seed.
fn sharded(ctx: &RankContext, plan: Plan, seed: u64) -> Result<Runtime> {
    let mesh = ctx.mesh(&[("pp", RANKS), ("tp", 1)])?;
    let mut g = PipeBuilder::<MeshVarBuilder>::new();
    let mut h = g.input("x", In::Arg);
    for i in 0..RANKS {
        let block = |vb: &MeshVarBuilder| {
            let (up, down) =
                (Linear::new(2, 4, true, &vb.pp("up"))?, Linear::new(4, 2, true, &vb.pp("down"))?);
            Ok(sharded_op(vb.mesh(), move |x| down.forward(&up.forward(x)?.tanh()?)))
        };
        h = g.module(&format!("blocks.{i}"), block, [h]);
    }
    g.loss_fn(|xs, _| Ok(xs[0].full_tensor()?.sqr()?.mean_all()?), [h], LossReduction::Mean);
    let vb = MeshVarBuilder::fresh(seed, &mesh.axis("tp")?, plan, DType::F64, &Device::Cpu)?;
    Runtime::new(&g.finish(EqualCount(RANKS))?, &schedule()?, ctx.group(), &vb, &Device::Cpu)
}

const MISTAKES: [Mistake; 10] = [
    ("another number of microbatches", &["3 microbatches for a schedule of 4"], |ctx| {
        step(&chain(ctx)?, 8, 3).map(drop)
    }),
    ("a batch of unlike size on each rank", &["rows", "give all ranks the same batch and options"], |ctx| {
        step(&chain(ctx)?, 8 + ctx.rank(), MICROBATCHES).map(drop)
    }),
    ("an input by another name", &["the model has no input \"tokens\""], |ctx| {
        let x = Kwargs::from([("tokens".into(), Tensor::zeros((8, 2), DType::F64, &Device::Cpu)?.into())]);
        let batch = split_args_kwargs_into_chunks(&[], &x, MICROBATCHES, None, None)?;
        chain(ctx)?.forward_backward(&batch, &StepOptions::default()).map(drop)
    }),
    ("a schedule for another number of ranks", &["it has 3 ranks, the group has 2"], |ctx| {
        runtime(&ScheduleKind::GPipe.schedule(3, MICROBATCHES, 1)?, ctx, &plain()).map(drop)
    }),
    ("a pipe of another number of stages", &["it has 2 stages, the pipe has 3"], |ctx| {
        let vb = crate::runtime::chain::parameters()?;
        Runtime::new(&pipe(3, &plain())?, &schedule()?, ctx.group(), &vb, &Device::Cpu).map(drop)
    }),
    ("a schedule of each rank", &["made different calls (description differs)"], |ctx| {
        let kind = [ScheduleKind::GPipe, ScheduleKind::OneFOneB][ctx.rank()];
        runtime(&kind.schedule(RANKS, MICROBATCHES, 1)?, ctx, &plain()).map(drop)
    }),
    ("a seed of each rank", &["rank 0 builds its stages with seed 0, and rank 1 with seed 1"], |ctx| {
        sharded(ctx, Plan::none(), ctx.rank() as u64).map(drop)
    }),
    ("no loss", &["it has backward passes, but the pipe has no loss; declare one"], |ctx| {
        let g = layers(["layers.0", "layers.1"]);
        let vb = crate::runtime::chain::parameters()?;
        let runtime = Runtime::new(&g.finish(EqualCount(2))?, &schedule()?, ctx.group(), &vb, &Device::Cpu)?;
        step(&runtime, 8, MICROBATCHES).map(drop)
    }),
    ("a name of a node that is used twice", &["layers.0"], |_| {
        layers(["layers.0", "layers.0"]).finish(EqualCount(2)).map(drop)
    }),
    ("a cut at a node that is not there", &["nothing to split at is named \"layer.1\""], |_| {
        layers(["layers.0", "layers.1"])
            .finish(SplitSpec::at([("layer.1", candle_pipe::SplitPoint::Beginning)]))
            .map(drop)
    }),
];

#[test]
fn mistakes_that_all_ranks_hear_of() {
    on_all_ranks(RANKS, &MISTAKES);
}

const OF_ONE_RANK: [Mistake; 4] = [
    (
        "the loss read on the first rank",
        &["rank 0: ", "is on rank 1, which has the last stage", "Runtime::loss"],
        |ctx| {
            let made = step(&chain(ctx)?, 8, MICROBATCHES)?;
            if ctx.rank() == 0 { made.step.loss().map(drop) } else { Ok(()) }
        },
    ),
    ("a step of one rank", &["returned while other ranks wait for it"], |ctx| {
        let runtime = chain(ctx)?;
        if ctx.rank() == 0 { step(&runtime, 8, MICROBATCHES).map(drop) } else { Ok(()) }
    }),
    ("a runtime of one rank", &["returned while other ranks wait for it"], |ctx| {
        if ctx.rank() == 1 { chain(ctx).map(drop) } else { Ok(()) }
    }),
    ("the loss of all ranks asked for by one", &["returned while other ranks wait for it"], |ctx| {
        let runtime = chain(ctx)?;
        let made = step(&runtime, 8, MICROBATCHES)?;
        if ctx.rank() == 0 { runtime.loss(&made).map(drop) } else { Ok(()) }
    }),
];

#[test]
fn mistakes_of_one_rank() {
    of_the_world(&OF_ONE_RANK);
}

/// A plan that matches modules of some stages only is complete, and so is a model that is a part of a larger one.
#[test]
fn plans_of_all_stages_together() {
    World::threads(RANKS)
        .run(|ctx| -> Result<()> {
            let typo = Plan::new("tp").with("blocks.*.upp", ColwiseParallel::default());
            let plan = Plan::new("tp")
                .with("blocks.0.up", ColwiseParallel::default())
                .with("blocks.1.down", RowwiseParallel::default());
            let runtime = sharded(ctx, plan, 1)?;
            // A typo is a warning.
            let vb = MeshVarBuilder::fresh(
                1,
                &ctx.mesh(&[("tp", 1), ("pp", RANKS)])?.axis("tp")?,
                typo,
                DType::F64,
                &Device::Cpu,
            )?;
            assert_eq!(vb.finish_stages(ctx.group())?, ["\"blocks.*.upp\""]);
            let made = step(&runtime, 8, MICROBATCHES)?;
            assert!(runtime.loss(&made)?.is_finite());
            let mesh = ctx.mesh(&[("world", RANKS)])?;
            let x = Tensor::new(&[ctx.rank() as f64], &Device::Cpu)?;
            assert!(DTensor::distribute(&x, &mesh, &[Replicate]).is_err());
            Ok(())
        })
        .unwrap();
}
