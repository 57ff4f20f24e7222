//! A pipeline: six layers on three ranks, under 1F1B, with 19 rows in eight microbatches. It saves a checkpoint, from which two ranks and
//! one rank go on with the same losses.

use std::path::Path;

use anyhow::{Result, ensure};
use candle_core::{DType, Tensor};
use candle_nn::{ParamsAdamW, VarBuilder, VarMap, loss::mse};
use candle_pipe::nn::{linear, seq};
use candle_pipe::{Pipe, prelude::*};
use candle_shard::{checkpoint::save_stages, nn::AdamW};

/// Declares the model with its loss, and cuts it.
fn model(stages: usize) -> candle_pipe::Result<Pipe<VarBuilder<'static>>> {
    let mut g = PipeBuilder::<VarBuilder<'static>>::new();
    let (mut h, target) = (g.input("x", In::Arg), g.input("target", In::Arg));
    for i in 0..6 {
        h = g.module(&i.to_string(), |vb| Ok(seq().add(linear(4, 4, vb.clone())?).add_fn(Tensor::tanh)), [h]);
    }
    g.loss_fn(|xs, _| Ok(mse(xs[0].tensor()?, xs[1].tensor()?)?), [h, target], LossReduction::Mean);
    g.finish(EqualCount(stages))
}

/// Trains from step `start` to step 10, with a checkpoint after five steps. Returns the losses.
fn train(ctx: &RankContext, start: u64, folder: &Path) -> Result<Vec<f64>> {
    let schedule = ScheduleKind::OneFOneB.schedule(ctx.world_size(), 8, 1)?;
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, ctx.device());
    let runtime = Runtime::new(&model(ctx.world_size())?, &schedule, ctx.group(), &vb, ctx.device())?;
    let parameters = runtime.parameters()?;
    let mut optimizer = AdamW::new(&parameters, ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() })?;
    if start > 0 {
        parameters.load(folder)?;
        optimizer.load(folder)?;
    }
    let x = Tensor::arange(0f32, 76.0, ctx.device())?.sin()?.reshape((19, 4))?;
    let step = |step| -> Result<f64> {
        let made = runtime.step(step, [&x, &x])?;
        optimizer.step(&made.step.grads)?;
        if step == 4 {
            save_stages(folder, ctx.group(), &[parameters.named_tensors(), optimizer.state()?].concat())?;
        }
        Ok(runtime.loss(&made)?)
    };
    (start..10).map(step).collect()
}

fn main() -> Result<()> {
    let folder = tempfile::tempdir()?;
    let want = World::threads(3).run(|ctx| train(ctx, 0, folder.path()))?.swap_remove(0);
    for stages in [2, 1] {
        let losses = World::threads(stages).run(|ctx| train(ctx, 5, folder.path()))?.swap_remove(0);
        println!("losses {losses:.6?} on {stages}, {:.6?} on three", &want[5..]);
        ensure!(losses.iter().zip(&want[5..]).all(|(a, b)| (a - b).abs() < 1e-6), "the losses do not go on");
    }
    Ok(())
}
