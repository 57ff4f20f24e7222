//! Gradients of 16-bit parameters are summed in f32, and computations follow each other as the schedule says.
use crate::runtime::chain::{Tail, batch, runtime};
use crate::runtime::model::{Vb, builder, numbers};
use crate::runtime::parity::{self, schedules};
use candle_core::{DType, Tensor, Var};
use candle_dist::{DataParallelOptions, round_grads};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::{Costs, Edges, Pass, ScheduleKind};
use candle_pipe::{
    In, Kwargs, LocalPipe, LossReduction, Pipe, PipeBuilder, Result, Runtime, Share, SplitSpec, StepOptions,
};
use std::sync::Arc;
use test_utils::{device, on_ranks};

const MICROBATCHES: usize = 129;

/// Two stages, the sum of `x` times a shared weight of each and a weight of the last: gradients are sums of `x`.
fn declare(share: Share) -> Result<Pipe<Vb>> {
    let mut g = PipeBuilder::<Vb>::new();
    let x = g.input("x", In::Arg);
    let tied = g.parameter("tied", share, |vb| Ok(vb.get(1, "tied")?));
    let times = |xs: &[candle_pipe::Value], _: &candle_pipe::Ctx| {
        Ok(xs[0].tensor()?.broadcast_mul(xs[1].tensor()?)?.into())
    };
    let h = g.func("first", times, [x, tied]);
    g.split();
    let h = g.func("second", times, [h, tied]);
    let last = |vb: &Vb| {
        let weight = vb.get(1, "weight")?;
        Ok(candle_pipe::stage_op(move |xs, _| Ok(vec![xs[0].tensor()?.broadcast_mul(&weight)?.into()])))
    };
    let y = g.module("last", last, [h]);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sum_all()?), [y], LossReduction::Sum);
    g.finish(SplitSpec::declared())
}

/// One row of 1 and many of 1/128, which bf16 cannot add to 1.
fn rows() -> Result<Microbatches> {
    let rows = (0..MICROBATCHES).map(|row| if row == 0 { 1f32 } else { 1.0 / 128.0 });
    let x = Tensor::from_iter(rows, &device())?.reshape((MICROBATCHES, 1))?.to_dtype(DType::BF16)?;
    split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), MICROBATCHES, None, None)
}

fn ones() -> Result<Vb> {
    let one = Tensor::ones(1, DType::BF16, &device())?;
    builder(&[("tied".to_string(), one.clone()), ("last.weight".to_string(), one)].into(), DType::BF16)
}

#[test]
fn gradients_of_bf16_parameters_lose_nothing_over_microbatches() {
    // The sum of all rows is 2; the shared weight is used twice.
    let want = |name: &str| if name == "tied" { [4.0] } else { [2.0] };
    for share in [Share::Replicate, Share::Transmit] {
        let local = LocalPipe::new(&declare(share).unwrap(), &ones().unwrap(), &device()).unwrap();
        let mut step = local.forward_backward(&rows().unwrap(), &StepOptions::default()).unwrap();
        for (name, parameter) in local.parameters() {
            let grad = step.grads.get(parameter).unwrap();
            assert_eq!(
                (grad.dtype(), numbers(grad).unwrap().as_slice()),
                (DType::F32, want(name).as_slice()),
                "{name}"
            );
        }
        // For optimizers that want them so.
        let vars: Vec<Var> = local.named_vars().unwrap().into_iter().map(|(_, var)| var).collect();
        round_grads(&mut step.grads, &vars).unwrap();
        assert!(vars.iter().all(|var| step.grads.get(var).unwrap().dtype() == DType::BF16));

        for (dp, kind) in [(1, ScheduleKind::GPipe), (1, ScheduleKind::ZbH1), (2, ScheduleKind::OneFOneB)] {
            on_ranks(2 * dp, kind.name(), move |ctx| -> Result<()> {
                let mesh = ctx.mesh(&[("pp", 2), ("dp", dp)])?;
                let schedule = kind.schedule(2, MICROBATCHES, 1)?;
                let pipe = declare(share)?;
                let mut runtime =
                    Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &ones()?, &device())?;
                if dp > 1 {
                    runtime =
                        runtime.with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
                }
                let made = runtime.forward_backward(&rows()?, &StepOptions::default())?.step;
                for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
                    let grad = made.grads.get(parameter).unwrap();
                    assert_eq!(
                        (grad.dtype(), numbers(grad)?.as_slice()),
                        // A sum is one over all replicas.
                        (DType::F32, want(name).map(|sum| sum * dp as f64).as_slice()),
                        "{name}"
                    );
                }
                Ok(())
            });
        }
    }
}

/// A count, not a time, so it holds on a busy machine: nobody waits for more than the schedule says.
#[test]
fn the_critical_path_is_the_simulated_one() {
    let mut compared = 0;
    for ranks in 1..=4 {
        for (label, schedule) in schedules(ranks, &parity::MICROBATCHES) {
            let passes =
                schedule.ranks().iter().flatten().flatten().flat_map(|action| action.computes().to_vec());
            let passes: Vec<Pass> = passes.map(|compute| compute.pass).collect();
            let (whole, split) = (passes.contains(&Pass::Backward), passes.contains(&Pass::Weight));
            if whole && split {
                continue; // one number cannot be that of a pass and of both of its halves
            }
            compared += 1;
            let costs = |stages| Costs {
                forward: vec![1.0; stages],
                input: vec![1.0; stages],
                weight: vec![if split { 1.0 } else { 0.0 }; stages],
                ..Costs::per_rank(schedule.stage_ranks(), 1.0, 1.0, 1.0)
            };
            let edges = Edges::chain(schedule.stages());
            let want = schedule.simulate(&edges, &costs(schedule.stages())).unwrap().makespan();
            let plan = schedule.clone();
            let paths = on_ranks(ranks, &label, move |ctx| -> Result<usize> {
                let tail: Tail = Arc::new(|_, _, y, _| Ok(y.clone()));
                let runtime = runtime(&plan, ctx, &tail)?;
                let batch = batch(plan.microbatches() * 2, plan.microbatches())?;
                Ok(runtime.forward_backward(&batch, &StepOptions::default())?.critical_path)
            });
            assert_eq!(paths.into_iter().max(), Some(want as usize), "{label}");
        }
    }
    assert!(compared > 20, "{compared}");
}
