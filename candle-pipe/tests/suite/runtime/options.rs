//! Options of steps and of evaluations: each is heeded, or refused on all ranks alike.
use crate::runtime::chain::{self, Tail};
use crate::runtime::model::numbers;
use crate::runtime::parity::close;
use candle_core::{DType, Tensor};
use candle_pipe::microbatch::Microbatches;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{Keep, LocalPipe, Result, StepOptions, StepResult};
use std::sync::Arc;
use test_utils::{device, on_ranks};

/// A stage adds the number of the step and of its first row, and 1000 in training.
fn tail() -> Tail {
    Arc::new(|_, _, y, ctx| {
        let training = if ctx.training { 1000.0 } else { 0.0 };
        Ok((y + (ctx.step as f64 + 0.1 * ctx.rows.start as f64 + training))?)
    })
}

/// A call of a runtime or of a pipe in one process.
type Call<'a> = &'a dyn Fn(&Microbatches, &StepOptions) -> Result<StepResult>;

#[test]
fn an_evaluation_heeds_its_options() {
    for ranks in [1, 2, 3] {
        on_ranks(ranks, "evaluation", move |ctx| -> Result<()> {
            let schedule = ScheduleKind::OneFOneB.schedule(ranks, 4, 1)?;
            let runtime = chain::runtime(&schedule, ctx, &tail())?;
            let local = LocalPipe::new(&chain::pipe(ranks, &tail())?, &chain::parameters()?, &device())?;
            let calls: [Call<'_>; 2] =
                [&|batch, options| Ok(runtime.evaluate(batch, options)?.step), &|batch, options| {
                    local.evaluate(batch, options)
                }];
            let (whole, batch) = (chain::batch(6, 1)?, chain::batch(6, 4)?);
            let train =
                |options: &StepOptions| local.forward_backward(&whole, &options.clone().training(false));
            let plain = StepOptions::default();
            for options in [
                plain.clone(),
                plain.clone().step(3).first_row(5),
                plain.clone().outputs(false),
                plain.clone().training(false).weights(vec![0.5, 0.25, 3.0, 0.0]),
            ] {
                for call in calls {
                    let made = call(&batch, &options)?;
                    assert_eq!(made.outputs.len(), if options.outputs { 4 } else { 0 });
                    let Ok(loss) = made.loss() else { continue };
                    let one = |(at, of): (usize, &Tensor)| {
                        Ok(options.weights.as_ref().map_or(0.0, |weights| weights[at]) * numbers(of)?[0])
                    };
                    let want = match options.weights {
                        // Rows are numbered in each microbatch.
                        None => mean(&local, &batch, &options)?,
                        Some(_) => made.losses.iter().enumerate().map(one).sum::<Result<f64>>()?,
                    };
                    close(&numbers(loss)?, &[want], 1e-12, &format!("{options:?}"));
                    if options.first_row > 0 {
                        let from_0 = mean(&local, &batch, &options.clone().first_row(0))?;
                        assert!((want - from_0).abs() > 1e-6, "the rows count");
                    }
                    assert!(
                        (want - numbers(train(&options.clone().step(9).weights(None))?.loss()?)?[0]).abs()
                            > 0.1
                    );
                }
            }
            Ok(())
        });
    }
}

/// The mean loss of a batch in evaluation mode, from a step that has backward passes.
fn mean(local: &LocalPipe, batch: &Microbatches, options: &StepOptions) -> Result<f64> {
    let made = local.forward_backward(batch, &options.clone().training(false))?;
    Ok(made.loss()?.to_dtype(DType::F64)?.to_scalar()?)
}

#[test]
fn an_evaluation_refuses_what_it_cannot_heed() {
    for (ranks, odd) in [(1, 0), (3, 0), (3, 2)] {
        on_ranks(ranks, "refused", move |ctx| -> Result<()> {
            let runtime = chain::runtime(&ScheduleKind::GPipe.schedule(ranks, 2, 1)?, ctx, &tail())?;
            let local = LocalPipe::new(&chain::pipe(ranks, &tail())?, &chain::parameters()?, &device())?;
            let (batch, plain) = (chain::batch(4, 2)?, StepOptions::default());
            for (wrong, why) in [
                (plain.clone().keep(Keep::Inputs), "keep in an evaluation"),
                (plain.clone().keep([Keep::Activations]), "keep in an evaluation"),
                (plain.clone().split_backward(true), "split_backward in an evaluation"),
                (plain.clone().loss_scale(2.0), "loss_scale in an evaluation"),
                (plain.clone().training(true), "training(true) in an evaluation"),
                (plain.clone().weights(vec![1.0]), "1 weights for 2 microbatches"),
            ] {
                let said = local.evaluate(&batch, &wrong).unwrap_err().to_string();
                assert!(said.contains(why), "{said}");
                let mine = if ctx.rank() == odd { &wrong } else { &plain };
                for said in [
                    runtime.evaluate(&batch, mine).map(drop).unwrap_err(),
                    runtime.evaluate_each(&batch, mine, |_, _| Ok(())).map(drop).unwrap_err(),
                ] {
                    assert!(said.to_string().contains(why), "{said}");
                }
                runtime.evaluate(&batch, &plain)?;
            }
            let without = plain.clone().outputs(ctx.rank() != odd);
            let said =
                runtime.evaluate_each(&batch, &without, |_, _| Ok(())).map(drop).unwrap_err().to_string();
            assert!(said.contains("outputs(false) in evaluate_each"), "{said}");
            runtime.evaluate_each(&batch, &plain, |_, _| Ok(())).map(drop)
        });
    }
}

#[test]
fn stages_have_one_value_of_keep_each_and_all_ranks_the_same() {
    on_ranks(3, "keep", |ctx| -> Result<()> {
        let runtime = chain::runtime(&ScheduleKind::OneFOneB.schedule(3, 3, 1)?, ctx, &tail())?;
        let local = LocalPipe::new(&chain::pipe(3, &tail())?, &chain::parameters()?, &device())?;
        let (batch, plain) = (chain::batch(6, 3)?, StepOptions::default());
        for count in [2, 4] {
            let wrong = plain.clone().keep(vec![Keep::Inputs; count]);
            let why =
                format!("keep has {count} values for 3 stages; give one for all stages, or one for each");
            let mine = if ctx.rank() == 1 { &wrong } else { &plain };
            for said in [
                local.forward_backward(&batch, &wrong).map(drop).unwrap_err(),
                runtime.forward_backward(&batch, mine).map(drop).unwrap_err(),
            ] {
                assert!(said.to_string().contains(&why), "{said}");
            }
        }
        // What one rank recomputes, the ranks that it shares calls with recompute too.
        let keep =
            [Keep::Inputs, if ctx.rank() == 2 { Keep::Inputs } else { Keep::Activations }, Keep::Activations];
        let said =
            runtime.forward_backward(&batch, &plain.clone().keep(keep)).map(drop).unwrap_err().to_string();
        assert!(said.contains("the data that stages keep of rank 2 is not that of rank 0"), "{said}");
        let scaled = plain.clone().loss_scale(if ctx.rank() == 1 { 2.0 } else { 1.0 });
        let said = runtime.forward_backward(&batch, &scaled).map(drop).unwrap_err().to_string();
        assert!(said.contains("the scale of the loss or the data that stages keep of rank 1"), "{said}");
        // One for all is the same as one for each.
        let keep = if ctx.rank() == 2 { vec![Keep::Inputs] } else { vec![Keep::Inputs; 3] };
        runtime.forward_backward(&batch, &plain.keep(keep)).map(drop)
    });
}
