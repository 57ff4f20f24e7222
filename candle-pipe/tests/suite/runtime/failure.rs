//! What fails on one rank fails on all, and says where.
use crate::runtime::chain::{Tail, batch, pipe, runtime};
use crate::runtime::model;
use candle_core::backend::{BackendDevice, BackendStorage};
use candle_core::{CpuStorage, CudaStorage, CustomOp1, InplaceOp1, Layout, Shape, Tensor, bail};
use candle_core::{DType, Var};
use candle_dist::{Op, RankContext};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::{Compute, Pass, ScheduleKind};
use candle_pipe::{Kwargs, Result, Runtime, StepOptions};
use std::sync::Arc;
use std::time::Duration;
use test_utils::{Ranks, device};

/// How a pass fails.
#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    Error,
    Panic,
}

impl How {
    fn fail(self) -> candle_core::Result<()> {
        match self {
            Self::Error => bail!("on purpose"),
            Self::Panic => panic!("on purpose"),
        }
    }
}

/// A copy that fails forward or backward, or spoils for the weight pass what its layer took.
struct Trip {
    how: How,
    pass: Pass,
    taken: Tensor,
}

impl CustomOp1 for Trip {
    fn name(&self) -> &'static str {
        "trip"
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        if self.pass == Pass::Forward {
            self.how.fail()?;
        }
        Ok((x.clone(), layout.shape().clone()))
    }

    fn cuda_fwd(&self, x: &CudaStorage, layout: &Layout) -> candle_core::Result<(CudaStorage, Shape)> {
        if self.pass == Pass::Forward {
            self.how.fail()?;
        }
        Ok((x.try_clone(layout)?, layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        match self.pass {
            // The product that waits finds elements of another dtype.
            Pass::Weight => self.taken.inplace_op1(&Spoil)?,
            _ => self.how.fail()?,
        }
        Ok(Some(grad.clone()))
    }
}

/// Puts elements of another dtype in the place of a tensor's own.
struct Spoil;

impl InplaceOp1 for Spoil {
    fn name(&self) -> &'static str {
        "spoil"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> candle_core::Result<()> {
        *storage = CpuStorage::U8(vec![0; layout.shape().elem_count()]);
        Ok(())
    }

    fn cuda_fwd(&self, storage: &mut CudaStorage, layout: &Layout) -> candle_core::Result<()> {
        *storage = storage.device().zeros_impl(layout.shape(), DType::U8)?;
        Ok(())
    }
}

/// Fails in one computation.
fn trips(at: Compute, how: How) -> Tail {
    Arc::new(move |stage, x, y, ctx| {
        let here = stage == at.stage && ctx.microbatch == at.microbatch;
        let trip = Trip { how, pass: at.pass, taken: x.clone() };
        Ok(if here { y.contiguous()?.apply_op1(trip)? } else { y.clone() })
    })
}

/// What each rank of so many says when `f` has failed on it.
fn said(
    ranks: usize,
    label: &str,
    f: impl Fn(&RankContext) -> Result<()> + Send + Sync + 'static,
) -> Vec<String> {
    // A rank that returns its error as a value has not told the others by it.
    let told = Ranks::new(ranks, label).deadline(Duration::from_secs(5)).run(move |ctx| {
        Ok::<_, candle_dist::Error>(f(ctx).err().map_or_else(String::new, |error| error.to_string()))
    });
    told.unwrap()
}

#[test]
fn a_pass_that_fails_is_named_by_all_ranks() {
    use ScheduleKind::{GPipe, Interleaved1F1B, OneFOneB, ZbH1, Zbv};
    for (kind, v, ranks) in
        [(GPipe, 1, 2), (OneFOneB, 1, 4), (Interleaved1F1B, 2, 2), (ZbH1, 1, 3), (Zbv, 2, 2)]
    {
        let schedule = kind.schedule(ranks, 6, v).unwrap();
        for stage in [0, schedule.stages() / 2, schedule.stages() - 1] {
            let all =
                schedule.ranks().iter().flatten().flatten().flat_map(|action| action.computes().to_vec());
            // The first microbatch, one in the middle, and the last.
            let passes = all.filter(|at| at.stage == stage && [0, 3, 5].contains(&at.microbatch));
            for at in passes {
                for how in [How::Error, How::Panic] {
                    if how == How::Panic && at.pass == Pass::Weight {
                        continue; // what is spoiled is an error
                    }
                    let (rank, plan) = (schedule.stage_ranks()[stage], schedule.clone());
                    let label = format!("{kind} on {ranks}: {at:?} {how:?}");
                    let all = said(ranks, &label, move |ctx| {
                        let runtime = runtime(&plan, ctx, &trips(at, how))?;
                        runtime.forward_backward(&batch(12, 6)?, &StepOptions::default()).map(drop)
                    });
                    let pass = match at.pass {
                        Pass::Forward => format!("{stage}F{0} (stage {stage}, forward", at.microbatch),
                        Pass::Backward => format!("{stage}B{0} (stage {stage}, backward", at.microbatch),
                        Pass::Input => {
                            format!("{stage}I{0} (stage {stage}, backward for inputs", at.microbatch)
                        }
                        Pass::Weight => {
                            format!("{stage}W{0} (stage {stage}, backward for weights", at.microbatch)
                        }
                    };
                    let want = format!("rank {rank}: {pass} of microbatch {}): ", at.microbatch);
                    for said in &all {
                        assert!(said.contains(&want), "{label}: {all:?}, want {want}");
                        assert!(at.pass == Pass::Weight || said.contains("on purpose"), "{label}: {said}");
                    }
                }
            }
        }
    }
}

/// A chain whose tails do nothing.
fn plain() -> Tail {
    Arc::new(|_, _, y, _| Ok(y.clone()))
}

#[test]
fn ranks_that_differ_hear_of_it() {
    let schedule = |kind: ScheduleKind| kind.schedule(3, 4, 1).unwrap();
    let (gpipe, steady) = (schedule(ScheduleKind::GPipe), schedule(ScheduleKind::OneFOneB));
    let step = |runtime: &Runtime, rows, step| {
        runtime.forward_backward(&batch(rows, 4)?, &StepOptions::default().step(step)).map(drop)
    };

    let (a, b) = (gpipe.clone(), steady.clone());
    let schedules = said(3, "schedules", move |ctx| {
        runtime(if ctx.rank() == 1 { &a } else { &b }, ctx, &plain()).map(drop)
    });
    schedules.iter().for_each(|said| assert!(said.contains("description differs"), "{said}"));

    let plan = steady.clone();
    let pipes = said(3, "pipes", move |ctx| {
        let vb = model::builder(&model::Values::new(), DType::F64)?;
        let pipe = if ctx.rank() == 1 { model::pipe(3, false)? } else { pipe(3, &plain())? };
        Runtime::new(&pipe, &plan, ctx.group(), &vb, &device()).map(drop)
    });
    pipes.iter().for_each(|said| assert!(said.contains("description differs"), "{said}"));

    for odd in 0..3 {
        let plan = steady.clone();
        let rows = said(3, "rows", move |ctx| {
            step(&runtime(&plan, ctx, &plain())?, if ctx.rank() == odd { 9 } else { 8 }, 0)
        });
        rows.iter()
            .for_each(|said| assert!(said.contains("the rows of the microbatches of rank "), "{said}"));
        rows.iter()
            .for_each(|said| assert!(said.contains("; give all ranks the same batch and options"), "{said}"));

        let plan = steady.clone();
        let steps = said(3, "steps", move |ctx| {
            step(&runtime(&plan, ctx, &plain())?, 8, u64::from(ctx.rank() == odd))
        });
        steps.iter().for_each(|said| assert!(said.contains("the number of the step of rank "), "{said}"));
    }
}

#[test]
fn what_is_wrong_on_all_ranks_is_refused_before_anything_is_sent() {
    let plan = ScheduleKind::OneFOneB.schedule(3, 4, 1).unwrap();
    let errors = said(3, "refusals", move |ctx| {
        let runtime = runtime(&plan, ctx, &plain())?;
        let refused = |cut, want: &str| {
            let (made, sent) =
                candle_dist::comm::record(|| runtime.forward_backward(&cut, &StepOptions::default()));
            let said = made.unwrap_err().to_string();
            assert!(said.contains(want), "{said}");
            assert_eq!((sent.get(Op::Send).count, sent.get(Op::Recv).count), (0, 0));
        };
        refused(batch(8, 3)?, "3 microbatches for a schedule of 4");
        let nothing = Tensor::zeros((8, 2), DType::F64, &device())?;
        let kwargs = Kwargs::from([("y".to_string(), nothing.into())]);
        refused(split_args_kwargs_into_chunks(&[], &kwargs, 4, None, None)?, "no input \"y\"");
        let tracked = Var::zeros((8, 2), DType::F64, &device())?.as_tensor().clone();
        let tracked = split_args_kwargs_into_chunks(&[tracked.into()], &Kwargs::new(), 4, None, None)?;
        assert!(runtime.evaluate(&tracked, &StepOptions::default()).is_ok());
        refused(tracked, "input \"x\" is tracked, but ranks compute no gradients of inputs; detach it");
        // Nobody has failed, so all can go on.
        runtime.forward_backward(&batch(8, 4)?, &StepOptions::default()).map(drop)
    });
    assert_eq!(errors, ["", "", ""]);

    let plan = ScheduleKind::OneFOneB.schedule(2, 4, 1).unwrap();
    let world = said(3, "another world", {
        let plan = plan.clone();
        move |ctx| runtime(&plan, ctx, &plain()).map(drop)
    });
    world.iter().for_each(|said| assert!(said.contains("it has 2 ranks, the group has 3"), "{said}"));
    let stages = said(2, "another cut", move |ctx| {
        let vb = model::builder(&model::Values::new(), DType::F64)?;
        Runtime::new(&pipe(3, &plain())?, &plan, ctx.group(), &vb, &device()).map(drop)
    });
    stages.iter().for_each(|said| assert!(said.contains("it has 2 stages, the pipe has 3"), "{said}"));
}

#[test]
fn a_stage_that_cannot_be_built_is_named_by_all_ranks() {
    let plan = ScheduleKind::OneFOneB.schedule(3, 4, 1).unwrap();
    let all = said(3, "constructors", move |ctx| {
        // The parameters of one layer are missing, on the rank that has it.
        let vb = candle_nn::VarBuilder::from_tensors(
            (0..3)
                .filter(|layer| *layer != 1)
                .flat_map(|layer| {
                    let zeros = |dims: &[usize]| Tensor::zeros(dims, DType::F64, &device()).unwrap();
                    [
                        (format!("layers.{layer}.weight"), zeros(&[2, 2])),
                        (format!("layers.{layer}.bias"), zeros(&[2])),
                    ]
                })
                .collect(),
            DType::F64,
            &device(),
        );
        let refused = Runtime::new(&pipe(3, &plain())?, &plan, ctx.group(), &vb, &device()).map(drop);
        // Nobody has failed on the way.
        ctx.group().barrier()?;
        refused
    });
    for (rank, said) in all.iter().enumerate() {
        assert!(said.contains("node \"layers.1\": ") && said.contains("layers.1.weight"), "{said}");
        assert_eq!(said.contains("rank 1 cannot build its stages: "), rank != 1, "{said}");
    }
}
