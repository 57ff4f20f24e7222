//! Steps leave nothing behind: resident memory stays flat.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{EqualCount, In, Kwargs, PipeBuilder, Reduction, Result, Runtime, StepOptions, nn};
use test_utils::{on_ranks, stays_flat};

// One test, since memory is the process's.
#[test]
fn steps_leave_nothing_behind() {
    for (kind, v) in [(ScheduleKind::Interleaved1F1B, 2), (ScheduleKind::Zbv, 2)] {
        on_ranks(2, kind.name(), move |ctx| -> Result<()> {
            let mut g = PipeBuilder::<VarBuilder<'static>>::new();
            let mut h = g.input("x", In::Arg);
            for layer in 0..4 {
                h = g.module(&format!("layers.{layer}"), |vb| Ok(nn::linear(8, 8, vb.clone())?), [h]);
            }
            g.output("y", h);
            g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [h], Reduction::Mean);
            let (pipe, parameters) = (g.finish(EqualCount(4))?, VarMap::new());
            let vb = VarBuilder::from_varmap(&parameters, DType::F32, &Device::Cpu);
            let runtime = Runtime::new(&pipe, &kind.schedule(2, 4, v)?, ctx.group(), &vb, &Device::Cpu)?;
            let mut optimiser = SGD::new(parameters.all_vars(), 0.1)?;
            let x = Tensor::ones((10, 8), DType::F32, &Device::Cpu)?;
            let batch = split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), 4, None, None)?;
            stays_flat("steps", 1000, || {
                optimiser.step(&runtime.forward_backward(&batch, &StepOptions::default())?.step.grads)?;
                runtime.evaluate(&batch).map(drop)
            })
        });
    }
}
