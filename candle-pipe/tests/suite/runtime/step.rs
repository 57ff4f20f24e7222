//! A step of inputs by position, and the parameters of a runtime.
use crate::runtime::chain::{self, Tail};
use crate::runtime::model::numbers;
use candle_core::{DType, Tensor};
use candle_pipe::microbatch::Microbatches;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    EqualCount, In, LossReduction, PipeBuilder, Result, Runtime, SplitPoint, SplitSpec, StepOptions,
    sharded_op,
};
use candle_shard::checkpoint::save_stages;
use candle_shard::nn::{AdamW, Linear, MeshVarBuilder, Parameters, ParamsSgd, Sgd};
use candle_shard::parallel::Plan;
use std::sync::Arc;
use test_utils::{Scratch, device, on_ranks};

/// A stage adds the number of the step.
fn tail() -> Tail {
    Arc::new(|_, _, y, ctx| Ok((y + ctx.step as f64)?))
}

fn names(parameters: &Parameters) -> Vec<&str> {
    parameters.iter().map(|p| p.name.as_str()).collect()
}

#[test]
fn a_step_cuts_its_inputs_and_has_its_number() {
    for (ranks, rows, microbatches) in [(1, 4, 2), (2, 7, 3), (3, 2, 4), (5, 19, 8)] {
        on_ranks(ranks, "step", move |ctx| -> Result<()> {
            let runtime =
                chain::runtime(&ScheduleKind::OneFOneB.schedule(ranks, microbatches, 1)?, ctx, &tail())?;
            let x = Tensor::arange(0f64, 2.0 * rows as f64, &device())?.reshape((rows, 2))?.sin()?;
            let mut losses = Vec::new();
            for step in 0..3 {
                let made = runtime.step(step, [&x])?;
                let options = StepOptions::default().step(step);
                let want = runtime.forward_backward(&chain::batch(rows, microbatches)?, &options)?;
                for (name, var) in runtime.named_vars()? {
                    let [got, want] = [&made, &want].map(|made| numbers(made.step.grads.get(&var).unwrap()));
                    assert_eq!(got?, want?, "{name}");
                }
                losses.push(runtime.loss(&made)?);
                assert_eq!(losses.last(), Some(&runtime.loss(&want)?));
            }
            assert!(losses[0] != losses[1] && losses[1] != losses[2], "{losses:?}");
            Ok(())
        });
    }
}

#[test]
fn inputs_that_one_rank_cannot_cut_are_an_error_on_all_and_the_next_step_runs() {
    for odd in 0..3 {
        on_ranks(3, "odd", move |ctx| -> Result<()> {
            let runtime = chain::runtime(&ScheduleKind::GPipe.schedule(3, 2, 1)?, ctx, &tail())?;
            let x = Tensor::ones((4, 2), DType::F64, &device())?;
            let none = x.narrow(0, 0, 0)?;
            let said = runtime.step(0, [if ctx.rank() == odd { &none } else { &x }]).unwrap_err().to_string();
            assert!(said.contains("has no rows along dim 0"), "{said}");
            runtime.step(0, [&x]).map(drop)
        });
    }
}

#[test]
fn inputs_are_cut_by_rows() {
    let x = Tensor::arange(0u32, 7, &device()).unwrap();
    let batch = Microbatches::cut(3, [&x, &x]).unwrap();
    assert_eq!(batch.rows(), [3, 2, 2]);
    assert_eq!(batch.args[1][1].tensor().unwrap().to_vec1::<u32>().unwrap(), [3, 4]);
    let said = Microbatches::cut(3, [&x, &x.narrow(0, 0, 6).unwrap()]).unwrap_err().to_string();
    assert!(said.contains("args[0] has 7 rows") && said.contains("args[1] has 6"), "{said}");
}

#[test]
fn the_parameters_of_plain_stages_are_their_variables_and_load_on_other_stages() {
    let folder = Scratch::of_ranks("step");
    let mut losses = Vec::new();
    for (stages, saves) in [(3, true), (2, false), (1, false), (4, false)] {
        let path = folder.path("saved");
        let of_all = on_ranks(stages, "parameters", move |ctx| -> Result<f64> {
            let schedule = ScheduleKind::OneFOneB.schedule(stages, 2, 1)?;
            let mut g = PipeBuilder::new();
            let mut h = g.input("x", In::Arg);
            for i in 0..4 {
                let layer =
                    |vb: &candle_nn::VarBuilder<'static>| Ok(candle_pipe::nn::linear(2, 2, vb.clone())?);
                h = g.module(&format!("layers.{i}"), layer, [h]);
            }
            g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [h], LossReduction::Mean);
            let runtime = Runtime::new(
                &g.finish(EqualCount(stages))?,
                &schedule,
                ctx.group(),
                &chain::parameters()?,
                &device(),
            )?;
            let parameters = runtime.parameters()?;
            let want = runtime.named_vars()?;
            assert_eq!(names(&parameters), want.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>());
            let mut optimizer =
                AdamW::new(&parameters, candle_nn::ParamsAdamW { lr: 0.1, ..Default::default() })?;
            let x = Tensor::ones((4, 2), DType::F64, &device())?;
            // The last of many stages has the loss alone.
            assert_eq!(want.is_empty(), stages > 2 && ctx.rank() == stages - 1);
            let values = || want.iter().map(|(_, var)| numbers(var.as_tensor())).collect::<Result<Vec<_>>>();
            let fresh = values()?;
            match saves {
                true => {
                    optimizer.step(&runtime.step(0, [&x])?.step.grads)?;
                    save_stages(
                        &path,
                        ctx.group(),
                        &[parameters.named_tensors(), optimizer.state()?].concat(),
                    )?;
                }
                false => {
                    parameters.load(&path)?;
                    optimizer.load(&path)?;
                }
            }
            assert!(values()?.iter().zip(&fresh).all(|(now, fresh)| now != fresh));
            optimizer.step(&runtime.step(1, [&x])?.step.grads)?;
            runtime.loss(&runtime.step(2, [&x])?)
        });
        losses.extend(of_all);
    }
    assert!(losses.iter().all(|loss| (loss - losses[0]).abs() < 1e-12), "they go on to one loss: {losses:?}");
}

#[test]
fn the_parameters_of_sharded_stages_are_those_of_this_pipe() {
    on_ranks(4, "sharded", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("pp", 2), ("tp", 2)])?;
        let vb = MeshVarBuilder::fresh(5, &mesh.axis("tp")?, Plan::none(), DType::F64, &device())?;
        let runtime = |prefix: &'static str| {
            let mut g = PipeBuilder::<MeshVarBuilder>::new();
            let mut h = g.input("x", In::Arg);
            for i in 0..2 {
                let layer = |vb: &MeshVarBuilder| {
                    let layer = Linear::new(4, 4, true, vb)?;
                    Ok(sharded_op(vb.mesh(), move |x| layer.forward(x)))
                };
                h = g.module(&format!("{prefix}.{i}"), layer, [h]);
            }
            g.loss_fn(
                |xs, _| Ok(xs[0].dtensor()?.sqr()?.mean_all()?.full_tensor()?),
                [h],
                LossReduction::Mean,
            );
            let schedule = ScheduleKind::GPipe.schedule(2, 2, 1)?;
            let pipe = g.finish(SplitSpec::at([(format!("{prefix}.1").as_str(), SplitPoint::Beginning)]))?;
            Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &vb, &device())
        };
        let (first, second) = (runtime("first")?, runtime("second")?);
        let stage = mesh.local_rank("pp")?;
        let of = |prefix: &str| ["weight", "bias"].map(|which| format!("{prefix}.{stage}.{which}"));
        assert_eq!(names(&first.parameters()?), of("first"));
        assert_eq!(names(&second.parameters()?), of("second"));
        assert_eq!(vb.built().len(), 4);
        let parameters = second.parameters()?;
        let mut grads = second.step(0, [&Tensor::ones((4, 4), DType::F64, &device())?])?.step.grads;
        parameters.reduce(&mut grads)?;
        Sgd::new(&parameters, ParamsSgd::default())?.step(&grads)?;
        Ok(())
    });
}
