//! What ranks hold while a step runs, and after it.
use crate::runtime::chain::{Tail, batch, parameters, pipe, runtime};
use crate::runtime::parity::{MICROBATCHES, schedules};
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, CudaStorage, CustomOp1, Layout, Shape, Tensor};
use candle_pipe::schedule::{Costs, Edges, ScheduleKind};
use candle_pipe::{Keep, LocalPipe, Result, StepOptions};
use std::sync::Arc;
use std::sync::atomic::{AtomicIsize, Ordering};
use test_utils::{device, on_ranks};

/// Counts how many of its clones there are, and the most that there were.
#[derive(Debug, Default)]
struct Count {
    now: AtomicIsize,
    most: AtomicIsize,
}

/// One of what is counted, in a graph as long as that is held.
struct Counted(Arc<Count>);

impl Counted {
    fn new(count: &Arc<Count>) -> Self {
        let now = 1 + count.now.fetch_add(1, Ordering::SeqCst);
        count.most.fetch_max(now, Ordering::SeqCst);
        Self(count.clone())
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.now.fetch_sub(1, Ordering::SeqCst);
    }
}

impl CustomOp1 for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        Ok((x.clone(), layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        Ok((x.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(grad.clone()))
    }
}

#[test]
fn ranks_hold_what_the_simulator_says_and_nothing_afterwards() {
    for ranks in 1..=4 {
        for (label, schedule) in schedules(ranks, &MICROBATCHES) {
            let stages = schedule.stages();
            let costs = Costs::per_rank(schedule.stage_ranks(), 1.0, 1.0, 1.0);
            let simulated = schedule.simulate(&Edges::chain(stages), &costs).unwrap().peak_activations();
            let here = |rank: usize| schedule.stage_ranks().iter().filter(|&&other| other == rank).count();
            let expected: Vec<usize> = simulated
                .iter()
                .enumerate()
                .map(|(rank, peak)| (peak * here(rank) as f64).round() as usize)
                .collect();
            let is_split = schedule.ranks().iter().flatten().flatten().any(|action| {
                action.computes().iter().any(|compute| compute.pass == candle_pipe::schedule::Pass::Weight)
            });
            let held = on_ranks(ranks, &label, move |ctx| -> Result<(usize, isize)> {
                // Each rank has one of its own.
                let count = Arc::new(Count::default());
                let counter = count.clone();
                let tail: Tail =
                    Arc::new(move |_, _, y, _| Ok(y.contiguous()?.apply_op1(Counted::new(&counter))?));
                let runtime = runtime(&schedule, ctx, &tail)?;
                let batch = batch(schedule.microbatches() * 2, schedule.microbatches())?;
                let mut peaks = (0, 0);
                for keep in [Keep::Inputs, Keep::Activations] {
                    count.most.store(0, Ordering::SeqCst);
                    let made = runtime.forward_backward(&batch, &StepOptions::default().keep(keep))?;
                    // Not even while the results of the step are held.
                    assert_eq!(count.now.load(Ordering::SeqCst), 0, "graphs outlive their step");
                    peaks = (made.peak_activations, count.most.load(Ordering::SeqCst));
                    if keep == Keep::Inputs {
                        assert_eq!(peaks.1, 1, "one graph at a time is enough for inputs alone");
                    }
                }
                Ok(peaks)
            });
            for (rank, (peak, graphs)) in held.into_iter().enumerate() {
                assert_eq!(peak, expected[rank], "{label}: rank {rank}");
                // A graph goes with its input gradients, when a microbatch may still wait for its weight gradients.
                let most = expected[rank] as isize;
                assert!(
                    if is_split { graphs <= most } else { graphs == most },
                    "{label}: {graphs} graphs, {most}"
                );
            }
        }
    }
}

/// The first stages of 1F1B have the most microbatches under way, and give up the most by keeping inputs alone.
#[test]
fn stages_keep_what_each_is_told_to() {
    for (keep, expected) in [
        (vec![Keep::Activations], [4, 3, 2, 1]),
        (vec![Keep::Inputs, Keep::Inputs, Keep::Activations, Keep::Activations], [1, 1, 2, 1]),
        (vec![Keep::Activations, Keep::InputsUnchecked, Keep::Activations, Keep::Inputs], [4, 1, 2, 1]),
    ] {
        let label = format!("{keep:?}");
        let graphs = on_ranks(4, &label, move |ctx| -> Result<isize> {
            let count = Arc::new(Count::default());
            let counter = count.clone();
            let tail: Tail =
                Arc::new(move |_, _, y, _| Ok(y.contiguous()?.apply_op1(Counted::new(&counter))?));
            let runtime = runtime(&ScheduleKind::OneFOneB.schedule(4, 8, 1)?, ctx, &tail)?;
            runtime.forward_backward(&batch(16, 8)?, &StepOptions::default().keep(keep.clone()))?;
            Ok(count.most.load(Ordering::SeqCst))
        });
        assert_eq!(graphs, expected, "{label}");
    }
}

/// candle's backward pass also returns gradients of constants, such as the microbatches.
#[test]
fn gradients_of_a_step_are_those_of_variables_for_any_number_of_microbatches() {
    let plain: Tail = Arc::new(|_, _, y, _| Ok(y.clone()));
    for stages in [1, 2] {
        let counts = [1, 2, 16].map(|microbatches| {
            let tail = plain.clone();
            on_ranks(stages, "gradients", move |ctx| -> Result<[usize; 2]> {
                let schedule = ScheduleKind::GPipe.schedule(stages, microbatches, 1)?;
                let (runtime, batch) = (runtime(&schedule, ctx, &tail)?, batch(16, microbatches)?);
                let step = runtime.forward_backward(&batch, &StepOptions::default())?.step;
                let own: Vec<_> = runtime.named_vars()?.iter().map(|(_, var)| var.id()).collect();
                assert!(own.iter().all(|id| step.grads.get_id(*id).is_some()));
                let local = LocalPipe::new(&pipe(stages, &tail)?, &parameters()?, &device())?;
                let whole = local.forward_backward(&batch, &StepOptions::default())?;
                Ok([step.grads.get_ids().count(), whole.grads.get_ids().count()])
            })
        });
        assert!(counts.iter().all(|count| *count == counts[0]), "{stages} stages: {counts:?}");
    }
}
