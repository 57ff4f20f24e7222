//! Evaluations of many microbatches: what is on its way, what is kept, what is sent once.
use crate::runtime::chain::{self, Tail};
use crate::runtime::model::{Vb, builder, numbers};
use crate::runtime::parity::{MICROBATCHES, close, schedules};
use candle_core::{DType, Tensor};
use candle_dist::{Op, comm};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{In, Kwargs, LossReduction, PipeBuilder, Result, Runtime, Share, SplitSpec, StepOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;
use test_utils::{Ranks, device, on_ranks, skip_among_processes};

#[test]
fn a_fast_stage_does_not_pile_up_microbatches_before_a_slow_one() {
    if skip_among_processes("it counts in memory of both ranks") {
        return;
    }
    let microbatches = 100;
    let (made, used, most) =
        (Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let tail: Tail = {
        let (made, used, most) = (made.clone(), used.clone(), most.clone());
        Arc::new(move |stage, _, y, _| {
            if stage == 0 {
                let ahead = 1 + made.fetch_add(1, Ordering::SeqCst);
                most.fetch_max(ahead.saturating_sub(used.load(Ordering::SeqCst)), Ordering::SeqCst);
            } else {
                std::thread::sleep(Duration::from_millis(2));
                used.fetch_add(1, Ordering::SeqCst);
            }
            Ok(y.clone())
        })
    };
    on_ranks(2, "slow", move |ctx| -> Result<()> {
        let schedule = ScheduleKind::GPipe.schedule(2, microbatches, 1)?;
        let runtime = chain::runtime(&schedule, ctx, &tail)?;
        runtime.evaluate(&chain::batch(microbatches, microbatches)?, &StepOptions::default()).map(drop)
    });
    assert_eq!((made.load(Ordering::SeqCst), used.load(Ordering::SeqCst)), (microbatches, microbatches));
    // Four on their way, one that is made and one that is used.
    assert!(most.load(Ordering::SeqCst) <= 6, "{} microbatches were ahead", most.load(Ordering::SeqCst));
}

/// Some orders need more messages on their way than others; none gets stuck.
#[test]
fn every_schedule_evaluates_many_microbatches() {
    for ranks in 1..=4 {
        for (label, schedule) in schedules(ranks, &MICROBATCHES) {
            let outcome = Ranks::new(ranks, &label).deadline(Duration::from_secs(20)).run(
                move |ctx| -> Result<Vec<f64>> {
                    let tail: Tail = Arc::new(|_, _, y, _| Ok(y.clone()));
                    let runtime = chain::runtime(&schedule, ctx, &tail)?;
                    let batch = chain::batch(schedule.microbatches() * 2, schedule.microbatches())?;
                    // Twice: nothing is left of the first one.
                    let first = runtime.evaluate(&batch, &StepOptions::default())?.step;
                    let second = runtime.evaluate(&batch, &StepOptions::default())?.step;
                    let loss = |step: &candle_pipe::StepResult| step.loss().map_or(Ok(vec![]), numbers);
                    assert_eq!(loss(&first)?, loss(&second)?);
                    loss(&first)
                },
            );
            assert_eq!(outcome.unwrap().concat().len(), 1, "{label}");
        }
    }
    for (kind, stages) in
        [(ScheduleKind::LoopedBfs, 3), (ScheduleKind::Zbv, 2), (ScheduleKind::Interleaved1F1B, 2)]
    {
        let schedule = kind.schedule(3, 48, stages).unwrap();
        let outcome =
            Ranks::new(3, kind.name()).deadline(Duration::from_secs(20)).run(move |ctx| -> Result<()> {
                let tail: Tail = Arc::new(|_, _, y, _| Ok(y.clone()));
                chain::runtime(&schedule, ctx, &tail)?
                    .evaluate(&chain::batch(96, 48)?, &StepOptions::default())
                    .map(drop)
            });
        outcome.unwrap();
    }
}

/// A model with an output in each of its two stages.
fn with_outputs() -> Result<candle_pipe::Pipe<Vb>> {
    let mut g = PipeBuilder::<Vb>::new();
    let x = g.input("x", In::Arg);
    let a = g.func("twice", |xs, _| Ok((xs[0].tensor()? * 2.0)?.into()), [x]);
    g.output("a", a);
    g.split();
    let weight = g.parameter("weight", Share::Transmit, |vb| Ok(vb.get(1, "weight")?));
    let b = g.func("times", |xs, _| Ok(xs[0].tensor()?.broadcast_mul(xs[1].tensor()?)?.into()), [a, weight]);
    g.output("b", b);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sum_all()?), [b], LossReduction::Sum);
    g.finish(SplitSpec::declared())
}

#[test]
fn outputs_are_given_as_they_come_or_dropped() {
    for ranks in [1, 2] {
        on_ranks(ranks, "outputs", move |ctx| -> Result<()> {
            let schedule = match ranks {
                1 => ScheduleKind::LoopedBfs.schedule(1, 10, 2)?,
                _ => ScheduleKind::GPipe.schedule(2, 10, 1)?,
            };
            let three = Tensor::new(&[3f64], &device())?;
            let builder = builder(&[("weight".to_string(), three)].into(), DType::F64)?;
            let runtime = Runtime::new(&with_outputs()?, &schedule, ctx.group(), &builder, &device())?;
            let x = Tensor::arange(0f64, 20., &device())?;
            let batch = split_args_kwargs_into_chunks(&[(&x).into()], &Kwargs::new(), 10, None, None)?;
            let kept = runtime.evaluate(&batch, &StepOptions::default())?.step;
            let mut given = Vec::new();
            let made = runtime.evaluate_each(&batch, &StepOptions::default(), |microbatch, outputs| {
                given.push((microbatch, outputs));
                Ok(())
            })?;
            assert!(made.step.outputs.is_empty());
            if let Ok(loss) = made.step.loss() {
                close(&numbers(loss)?, &[190.0 * 6.0], 1e-12, "loss");
            }
            let names: Vec<&str> = [(0, "a"), (ranks - 1, "b")]
                .iter()
                .filter(|(r, _)| *r == ctx.rank())
                .map(|(_, n)| *n)
                .collect();
            assert_eq!((given.len(), kept.outputs.len()), (10, 10));
            for ((microbatch, outputs), kept) in given.iter().zip(&kept.outputs) {
                assert_eq!(outputs.keys().collect::<Vec<_>>(), names, "microbatch {microbatch}");
                assert!(candle_pipe::Value::Map(outputs.clone()).same(kept)?);
            }
            let options = StepOptions::default().outputs(false);
            let step = runtime.forward_backward(&batch, &options)?.step;
            assert!(step.outputs.is_empty() && step.grads.get_ids().count() <= 1);
            // What the function says ends the evaluation on all ranks.
            let said = runtime.evaluate_each(&batch, &StepOptions::default(), |_, _| {
                Err(candle_pipe::Error::Pipe("the disk is full".into()))
            });
            assert!(said.unwrap_err().to_string().contains("the disk is full"));
            Ok(())
        });
    }
}

#[test]
fn a_transmitted_parameter_is_sent_once_a_step() {
    on_ranks(2, "once", |ctx| -> Result<()> {
        let (microbatches, rows) = (6, 1000);
        let mut g = PipeBuilder::<Vb>::new();
        let x = g.input("x", In::Arg);
        let table = g.parameter("table", Share::Transmit, move |vb| Ok(vb.get((rows, 4), "table")?));
        let look = |xs: &[candle_pipe::Value], _: &candle_pipe::Ctx| {
            Ok(xs[1].tensor()?.index_select(xs[0].tensor()?, 0)?.into())
        };
        let a = g.func("first", look, [x, table]);
        g.split();
        let b = g.func("second", look, [x, table]);
        let sum = |xs: &[candle_pipe::Value], _: &candle_pipe::Ctx| {
            Ok((xs[0].tensor()? + xs[1].tensor()?)?.sum_all()?)
        };
        g.loss_fn(sum, [a, b], LossReduction::Sum);
        let pipe = g.finish(SplitSpec::declared())?;
        let values = Tensor::ones((rows, 4), DType::F64, &device())?;
        let builder = builder(&[("table".to_string(), values)].into(), DType::F64)?;
        let schedule = ScheduleKind::OneFOneB.schedule(2, microbatches, 1)?;
        let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &builder, &device())?;
        let ids = Tensor::from_iter((0..12u32).map(|id| id * 7 % 10), &device())?;
        let batch = split_args_kwargs_into_chunks(&[ids.into()], &Kwargs::new(), microbatches, None, None)?;
        for _ in 0..2 {
            let (made, sent) = comm::record(|| runtime.forward_backward(&batch, &StepOptions::default()));
            let step = made?.step;
            let whole = rows * 4 * size_of::<f64>();
            if ctx.rank() == 0 {
                let bytes = sent.get(Op::Send).bytes;
                assert!(
                    bytes >= whole && bytes < 2 * whole,
                    "{bytes} bytes were sent, the table has {whole}"
                );
                let grad = runtime.stages().flat_map(|stage| stage.parameters().values()).next().unwrap();
                let grad = step.grads.get(grad).unwrap();
                close(&[grad.sum_all()?.to_scalar::<f64>()?], &[2.0 * 12.0 * 4.0], 1e-12, "gradient");
            } else {
                close(&numbers(step.loss()?)?, &[2.0 * 12.0 * 4.0], 1e-12, "loss");
            }
            let (made, sent) = comm::record(|| runtime.evaluate(&batch, &StepOptions::default()));
            made?;
            assert!(sent.get(Op::Send).bytes < 2 * whole);
        }
        Ok(())
    });
}

#[test]
fn splitting_the_backward_pass_is_what_schedules_say() {
    on_ranks(2, "split", |ctx| -> Result<()> {
        let schedule = ScheduleKind::GPipe.schedule(2, 2, 1)?;
        let tail: Tail = Arc::new(|_, _, y, _| Ok(y.clone()));
        let runtime = chain::runtime(&schedule, ctx, &tail)?;
        let options = StepOptions::default().split_backward(true);
        let said = runtime.forward_backward(&chain::batch(4, 2)?, &options).unwrap_err().to_string();
        assert!(said.contains("split_backward on ranks, where the schedule defines the split"), "{said}");
        Ok(())
    });
}

/// The order that is proved to end is one of sends that do not wait, whatever bound there is on unread messages.
#[test]
fn a_bound_on_unread_messages_does_not_stop_a_pipeline() {
    for (kind, stages) in [(ScheduleKind::GPipe, 1), (ScheduleKind::LoopedBfs, 2), (ScheduleKind::Zbv, 2)] {
        let made = candle_dist::World::threads(2).timeout(Duration::from_secs(10)).mailbox_bytes(64).run(
            move |ctx| {
                let tail: Tail = Arc::new(|_, _, y, _| Ok(y.clone()));
                let schedule = kind.schedule(2, 8, stages)?;
                let runtime = chain::runtime(&schedule, ctx, &tail)?;
                let batch = chain::batch(32, 8)?;
                runtime.evaluate(&batch, &StepOptions::default())?;
                runtime.forward_backward(&batch, &StepOptions::default()).map(drop)
            },
        );
        made.unwrap();
    }
}
