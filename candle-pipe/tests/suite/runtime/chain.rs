//! A chain of stages, each one linear layer and a function of the test's.
use crate::runtime::model::{Vb, builder};
use candle_core::{DType, Tensor};
use candle_dist::RankContext;
use candle_nn::VarBuilder;
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::Schedule;
use candle_pipe::{Ctx, In, Kwargs, LossReduction, Pipe, PipeBuilder, Result, Runtime, SplitSpec, nn};
use std::sync::Arc;
use test_utils::device;

const WIDTH: usize = 2;

/// What a stage does with its layer's output; it is given that layer's input too.
pub(crate) type Tail = Arc<dyn Fn(usize, &Tensor, &Tensor, &Ctx) -> Result<Tensor> + Send + Sync>;

/// The chain of so many stages.
pub(crate) fn pipe(stages: usize, tail: &Tail) -> Result<Pipe<Vb>> {
    let mut g = PipeBuilder::<Vb>::new();
    let x = g.input("x", In::Arg);
    // Microbatches are views of one batch; each gets memory of its own.
    let mut h = g.func("own", |xs, _| Ok(xs[0].tensor()?.force_contiguous()?.into()), [x]);
    for stage in 0..stages {
        let x = h;
        let y = g.module(&format!("layers.{stage}"), |vb| Ok(nn::linear(WIDTH, WIDTH, vb.clone())?), [x]);
        let tail = tail.clone();
        h = g.func(
            &format!("tails.{stage}"),
            move |xs, ctx| Ok(tail(stage, xs[0].tensor()?, xs[1].tensor()?, ctx)?.into()),
            [x, y],
        );
        if stage + 1 < stages {
            g.split();
        }
    }
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [h], LossReduction::Mean);
    g.finish(SplitSpec::declared())
}

/// This rank's part of the chain for a schedule.
pub(crate) fn runtime(schedule: &Schedule, ctx: &RankContext, tail: &Tail) -> Result<Runtime> {
    Runtime::new(&pipe(schedule.stages(), tail)?, schedule, ctx.group(), &parameters()?, &device())
}

pub(crate) fn parameters() -> Result<VarBuilder<'static>> {
    let weight = Tensor::new(&[[0.5f64, -0.25], [0.75, 1.0]], &device())?;
    let bias = Tensor::new(&[0.1f64, -0.1], &device())?;
    let layer = |i: usize| {
        [(format!("layers.{i}.weight"), weight.clone()), (format!("layers.{i}.bias"), bias.clone())]
    };
    builder(&(0..32).flat_map(layer).collect(), DType::F64)
}

pub(crate) fn batch(rows: usize, microbatches: usize) -> Result<Microbatches> {
    let x = Tensor::arange(0f64, (rows * WIDTH) as f64, &device())?.reshape((rows, WIDTH))?.sin()?;
    split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), microbatches, None, None)
}
