//! Steps leave nothing behind, and the memory of an evaluation does not follow the number of microbatches.
#![cfg(target_os = "linux")]
#![allow(clippy::unwrap_used)] // a panic is how a test fails
use candle_core::{DType, Device, Tensor};
use candle_nn::{Optimizer, SGD, VarBuilder, VarMap};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{EqualCount, In, Kwargs, LossReduction, PipeBuilder, Result, Runtime, StepOptions, nn};
use peak_alloc::PeakAlloc;
use std::thread;
use std::time::Duration;
use test_utils::{on_ranks, stays_flat};

#[global_allocator]
static MEMORY: PeakAlloc = PeakAlloc;

// Memory is the process's: no other test may run at the same time.
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
            g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [h], LossReduction::Mean);
            let (pipe, parameters) = (g.finish(EqualCount(4))?, VarMap::new());
            let vb = VarBuilder::from_varmap(&parameters, DType::F32, &Device::Cpu);
            let runtime = Runtime::new(&pipe, &kind.schedule(2, 4, v)?, ctx.group(), &vb, &Device::Cpu)?;
            let mut optimizer = SGD::new(parameters.all_vars(), 0.1)?;
            let x = Tensor::ones((10, 8), DType::F32, &Device::Cpu)?;
            let batch = split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), 4, None, None)?;
            stays_flat("steps", 1000, || {
                optimizer.step(&runtime.forward_backward(&batch, &StepOptions::default())?.step.grads)?;
                runtime.evaluate(&batch, &StepOptions::default()).map(drop)
            })
        });
    }
}

const MIB: usize = 1 << 20;

/// So many microbatches of one number each.
fn numbers(microbatches: usize) -> Result<Microbatches> {
    let x = Tensor::ones((microbatches, 1), DType::F32, &Device::Cpu)?;
    split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), microbatches, None, None)
}

/// The most bytes that an evaluation holds beyond what was there before, where each microbatch is 1 MiB between the stages
/// and the first stage is faster than the second.
fn peak_of_evaluation(microbatches: usize) -> usize {
    let peaks = on_ranks(2, "evaluation", move |ctx| -> Result<usize> {
        let mut g = PipeBuilder::<VarBuilder<'static>>::new();
        let x = g.input("x", In::Arg);
        let wide = |xs: &[candle_pipe::Value], _: &candle_pipe::Ctx| {
            let x = xs[0].tensor()?;
            Ok(x.broadcast_as((x.dim(0)?, MIB / size_of::<f32>()))?.contiguous()?.into())
        };
        let h = g.func("wide", wide, [x]);
        g.split();
        let slow = |xs: &[candle_pipe::Value], _: &candle_pipe::Ctx| {
            thread::sleep(Duration::from_millis(2));
            Ok(xs[0].tensor()?.narrow(1, 0, 1)?.contiguous()?.into())
        };
        let y = g.func("slow", slow, [h]);
        g.loss_fn(|xs, _| Ok(xs[0].tensor()?.mean_all()?), [y], LossReduction::Mean);
        let pipe = g.finish(candle_pipe::SplitSpec::declared())?;
        let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
        let schedule = ScheduleKind::GPipe.schedule(2, microbatches, 1)?;
        let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &vb, &Device::Cpu)?;
        let batch = numbers(microbatches)?;
        ctx.group().barrier()?;
        MEMORY.reset_peak_usage();
        let before = MEMORY.current_usage();
        ctx.group().barrier()?;
        let loss = runtime.evaluate(&batch, &StepOptions::default())?.step.loss().cloned();
        if let Ok(loss) = loss {
            assert_eq!(loss.to_scalar::<f32>()?, 1.0);
        }
        Ok(MEMORY.peak_usage() - before)
    });
    peaks[0].max(peaks[1])
}

#[test]
fn the_memory_of_an_evaluation_does_not_follow_the_number_of_microbatches() {
    peak_of_evaluation(8);
    let peaks = [8, 64, 512].map(|microbatches| {
        let peak = peak_of_evaluation(microbatches);
        println!("{microbatches:4} microbatches of 1 MiB: {:.2} MiB", peak as f64 / MIB as f64);
        peak
    });
    // Four on their way, one on each stage, and what a stage makes of one. Kept losses and places of microbatches are
    // some hundred bytes each.
    let most = 8 * MIB;
    for (peak, microbatches) in peaks.into_iter().zip([8, 64, 512]) {
        assert!(peak <= most + microbatches * 4096, "{microbatches} microbatches take {peak} bytes");
    }
}
