//! A schedule: all forward passes, then the backward passes with the last microbatch first.
use candle_pipe::Result;
use candle_pipe::schedule::Schedule;

/// GPipe with its backward passes in the opposite order, so that a rank frees its newest activations first.
///
/// # Errors
/// If there are no ranks or no microbatches.
pub fn last_first(ranks: usize, microbatches: usize) -> Result<Schedule> {
    let row = |rank: usize| {
        let waits = |idle: usize| std::iter::repeat_n(String::new(), idle);
        let forward = (0..microbatches).map(move |m| format!("{rank}F{m}"));
        let backward = (0..microbatches).rev().map(move |m| format!("{rank}B{m}"));
        // Empty cells are for readers: a rank waits for its inputs anyway.
        let cells = waits(rank).chain(forward).chain(waits(2 * (ranks - 1 - rank))).chain(backward);
        cells.collect::<Vec<_>>().join(",")
    };
    // Reading checks the schedule: one that exists runs to its end.
    Schedule::from_csv(&(0..ranks).map(row).collect::<Vec<_>>().join("\n"))
}

#[cfg(test)]
mod tests {
    use super::*;
    use candle_core::{DType, Device, Tensor, Var};
    use candle_nn::VarBuilder;
    use candle_pipe::microbatch::split_args_kwargs_into_chunks;
    use candle_pipe::schedule::{Costs, Edges, ScheduleKind};
    use candle_pipe::{
        In, Kwargs, LocalPipe, LossReduction, Pipe, PipeBuilder, Runtime, SplitSpec, StepOptions, nn,
    };
    use std::collections::HashMap;
    use test_utils::{distance, on_ranks, values};

    #[test]
    fn it_takes_the_time_of_gpipe() -> Result<()> {
        for (ranks, microbatches) in [(1, 1), (2, 3), (4, 8)] {
            let time = |schedule: &Schedule| -> Result<f64> {
                let costs = Costs::per_rank(schedule.stage_ranks(), 1.0, 1.0, 1.0);
                Ok(schedule.simulate(&Edges::chain(schedule.stages()), &costs)?.makespan())
            };
            let gpipe = "gpipe".parse::<ScheduleKind>()?.schedule(ranks, microbatches, 1)?;
            assert_eq!(time(&last_first(ranks, microbatches)?)?, time(&gpipe)?);
        }
        assert!(last_first(2, 0).is_err());
        Ok(())
    }

    fn model() -> Result<Pipe<VarBuilder<'static>>> {
        let mut g = PipeBuilder::new();
        let x = g.input("x", In::Arg);
        let h = g.module("up", |vb: &VarBuilder<'static>| Ok(nn::linear_no_bias(2, 2, vb.clone())?), [x]);
        g.split();
        let y = g.module("down", |vb: &VarBuilder<'static>| Ok(nn::linear_no_bias(2, 2, vb.clone())?), [h]);
        g.loss_fn(|xs, _| Ok(xs[0].tensor()?.tanh()?.mean_all()?), [y], LossReduction::Mean);
        g.finish(SplitSpec::declared())
    }

    fn variables() -> candle_core::Result<VarBuilder<'static>> {
        let var = |seed| {
            Ok::<_, candle_core::Error>(
                Var::from_tensor(&values(&[2, 2], seed, DType::F64))?.as_tensor().clone(),
            )
        };
        let vars = HashMap::from([("up.weight".to_string(), var(1)?), ("down.weight".to_string(), var(2)?)]);
        Ok(VarBuilder::from_tensors(vars, DType::F64, &Device::Cpu))
    }

    #[test]
    fn gradients_are_those_of_one_device() -> Result<()> {
        let x = values(&[7, 2], 3, DType::F64);
        let whole = split_args_kwargs_into_chunks(&[(&x).into()], &Kwargs::new(), 1, None, None)?;
        let local = LocalPipe::new(&model()?, &variables()?, &Device::Cpu)?;
        let step = local.forward_backward(&whole, &StepOptions::default())?;
        let parameters = local.stages().iter().flat_map(|stage| stage.parameters());
        let want: HashMap<String, Tensor> =
            parameters.filter_map(|(name, p)| Some((name.clone(), step.grads.get(p)?.clone()))).collect();
        assert_eq!(want.len(), 2);
        on_ranks(2, "last first", move |ctx| -> Result<()> {
            let schedule = last_first(2, 3)?;
            let runtime = Runtime::new(&model()?, &schedule, ctx.group(), &variables()?, &Device::Cpu)?;
            let batch = split_args_kwargs_into_chunks(&[(&x).into()], &Kwargs::new(), 3, None, None)?;
            let step = runtime.forward_backward(&batch, &StepOptions::default())?.step;
            for (name, p) in runtime.stages().flat_map(|stage| stage.parameters()) {
                let got = step.grads.get(p).cloned().map_or_else(|| p.zeros_like(), Ok)?;
                assert!(distance(&got, &want[name]) < 1e-12, "{name}");
            }
            Ok(())
        });
        Ok(())
    }
}
