//! One clock for all ranks, and heads of messages that are no messages.
use crate::runtime::chain::{self, Tail};
use crate::runtime::model::numbers;
use crate::runtime::parity::{MICROBATCHES, close, schedules};
use candle_dist::{Op, comm};
use candle_pipe::schedule::{Compute, Pass, ScheduleKind, Span};
use candle_pipe::{Result, StepOptions};
use std::collections::HashMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;
use test_utils::{on_ranks, over_mpi};

fn identity() -> Tail {
    Arc::new(|_, _, y, _| Ok(y.clone()))
}

/// Clocks of ranks that each began when they came to the step would tell that a stage ended before its input was there.
#[test]
fn spans_of_all_ranks_are_by_one_clock() {
    let (ranks, microbatches) = (3, 4);
    let schedule = ScheduleKind::OneFOneB.schedule(ranks, microbatches, 1).unwrap();
    let spans = on_ranks(ranks, "one clock", move |ctx| -> Result<Vec<Span>> {
        let mut runtime = chain::runtime(&schedule, ctx, &identity())?;
        runtime.settle_clocks()?;
        // Ranks come to the step one after the other; it begins with the last one.
        thread::sleep(Duration::from_millis(20 * ctx.rank() as u64));
        Ok(runtime.forward_backward(&chain::batch(8, microbatches)?, &StepOptions::default())?.spans)
    });
    let of = |span: &Span| match span.action.computes()[..] {
        [Compute { stage, pass, microbatch }] => ((stage, pass == Pass::Forward, microbatch), *span),
        _ => panic!("{span:?}"),
    };
    let at: HashMap<_, _> = spans.iter().flatten().map(of).collect();
    assert_eq!(at.len(), 2 * ranks * microbatches);
    // Processes know each other's clock to half a round trip, which is far less than the 20 ms between the ranks.
    let known_to = if over_mpi() { 0.005 } else { 0.0 };
    for microbatch in 0..microbatches {
        for stage in 1..ranks {
            let (before, after) = (at[&(stage - 1, true, microbatch)], at[&(stage, true, microbatch)]);
            assert!(
                before.start >= -known_to && before.end <= after.start + known_to,
                "{before:?}, then {after:?}"
            );
            let (after, before) = (at[&(stage - 1, false, microbatch)], at[&(stage, false, microbatch)]);
            assert!(before.end <= after.start + known_to, "{before:?}, then {after:?}");
        }
    }
}

#[test]
fn heads_in_the_store_change_no_number_and_send_tensors_alone() {
    for ranks in 1..=3 {
        for (label, schedule) in schedules(ranks, &MICROBATCHES).into_iter().step_by(3) {
            on_ranks(ranks, &label, move |ctx| -> Result<()> {
                let batch = chain::batch(schedule.microbatches() * 2 + 1, schedule.microbatches())?;
                let plain = chain::runtime(&schedule, ctx, &identity())?;
                let stored = chain::runtime(&schedule, ctx, &identity())?.heads_in_store(ctx.store())?;
                // Twice: notes of a step are not those of the next.
                for _ in 0..2 {
                    let (want, sent) =
                        comm::record(|| plain.forward_backward(&batch, &StepOptions::default()));
                    let (got, less) =
                        comm::record(|| stored.forward_backward(&batch, &StepOptions::default()));
                    let (want, got) = (want?.step, got?.step);
                    if let Ok(loss) = want.loss() {
                        assert_eq!(numbers(got.loss()?)?, numbers(loss)?);
                    }
                    for (plain, stored) in plain.stages().zip(stored.stages()) {
                        for (name, parameter) in plain.parameters() {
                            let grad = got.grads.get(&stored.parameters()[name]).expect("a gradient");
                            close(&numbers(grad)?, &numbers(want.grads.get(parameter).unwrap())?, 0.0, name);
                        }
                    }
                    // A head and a tensor each, and at first an outline on each way.
                    let (all, tensors) = (sent.get(Op::Send).count, less.get(Op::Send).count);
                    assert!(
                        all >= 2 * tensors && (tensors > 0 || all == 0),
                        "{all} messages and {tensors} tensors"
                    );
                    let evaluated = stored.evaluate(&batch, &StepOptions::default())?.step;
                    if let Ok(loss) = plain.evaluate(&batch, &StepOptions::default())?.step.loss() {
                        assert_eq!(numbers(evaluated.loss()?)?, numbers(loss)?);
                    }
                }
                Ok(())
            });
        }
    }
}
