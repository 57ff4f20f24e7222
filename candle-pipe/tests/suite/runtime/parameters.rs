//! Parameters by whatever name and from wherever: none is left without its gradient, or with a part of it.
use crate::runtime::model::{Vb, builder, numbers};
use candle_core::{DType, Tensor, Var};
use candle_dist::DataParallelOptions;
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::nn::linear_no_bias;
use candle_pipe::schedule::{Schedule, ScheduleKind};
use candle_pipe::{
    EqualCount, In, Kwargs, LocalPipe, LossReduction, Pipe, PipeBuilder, Result, Runtime, Scope, Share,
    SplitPoint, SplitSpec, StepOptions, Value,
};
use std::collections::HashMap;
use test_utils::{device, on_ranks};

fn product(xs: &[Value], _: &candle_pipe::Ctx) -> Result<Value> {
    Ok(xs[0].tensor()?.matmul(xs[1].tensor()?)?.tanh()?.into())
}

fn mean_square(xs: &[Value], _: &candle_pipe::Ctx) -> Result<Tensor> {
    Ok(xs[0].tensor()?.sqr()?.mean_all()?)
}

/// Two stages that both use one replicated parameter.
fn tied<B: Scope>(build: impl Fn(&B) -> Result<Tensor> + Send + Sync + 'static) -> Result<Pipe<B>> {
    let mut g = PipeBuilder::<B>::new();
    let x = g.input("x", In::Arg);
    let tied = g.parameter("part.tied", Share::Replicate, build);
    let h = g.func("in", product, [x, tied]);
    g.split();
    let y = g.func("out", product, [h, tied]);
    g.loss_fn(mean_square, [y], LossReduction::Mean);
    g.finish(SplitSpec::declared())
}

fn weight() -> Result<Tensor> {
    Ok(Tensor::arange(0f64, 9., &device())?.affine(0.1, -0.3)?.reshape((3, 3))?)
}

fn rows() -> Result<Microbatches> {
    rows_in(2)
}

fn rows_in(microbatches: usize) -> Result<Microbatches> {
    let x = Tensor::arange(0f64, 15., &device())?.sin()?.reshape((5, 3))?;
    split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), microbatches, None, None)
}

/// The gradient of each parameter on each of two ranks, beside that of one process.
fn against_one_process<B: Scope>(label: &str, pipe: fn() -> Result<Pipe<B>>, scope: fn() -> Result<B>) {
    on_ranks(2, label, move |ctx| -> Result<()> {
        let options = StepOptions::default();
        let local = LocalPipe::new(&pipe()?, &scope()?, &device())?;
        let want = local.forward_backward(&rows()?, &options)?.grads;
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        let runtime = Runtime::new(&pipe()?, &schedule, ctx.group(), &scope()?, &device())?;
        let got = runtime.forward_backward(&rows()?, &options)?.step.grads;
        let stage = runtime.stages().next().unwrap();
        assert!(!stage.parameters().is_empty());
        for (name, parameter) in stage.parameters() {
            let want = numbers(want.get(local.parameters()[name.as_str()]).unwrap())?;
            let got = numbers(got.get(parameter).unwrap())?;
            let off = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
            assert!(off < 1e-12, "gradient of {name} is off by {off}");
        }
        Ok(())
    });
}

#[test]
fn copies_of_a_parameter_are_summed_whatever_the_builder_puts_before_its_name() {
    let pipe = || tied::<Vb>(|vb| Ok(vb.get((3, 3), "tied")?));
    let scope =
        || Ok(builder(&HashMap::from([("model.part.tied".into(), weight()?)]), DType::F64)?.pp("model"));
    against_one_process("under a prefix", pipe, scope);
}

#[test]
fn so_are_copies_that_a_model_brings_itself() {
    let pipe = || {
        let own = Var::from_tensor(&weight()?)?;
        tied::<()>(move |()| Ok(own.as_tensor().clone()))
    };
    against_one_process("brought along", pipe, || Ok(()));
}

#[test]
fn so_are_copies_that_are_made_of_a_variable() {
    let pipe = || {
        let own = Var::from_tensor(&weight()?)?;
        tied::<()>(move |()| Ok(own.t()?))
    };
    against_one_process("made of a variable", pipe, || Ok(()));
}

#[test]
fn copies_start_with_the_values_of_the_first_stage() {
    // The first stage is on the first rank, and on the last.
    for (first, csv) in [(0, "0F0,0B0\n1F0,1B0\n"), (1, "1F0,1B0\n0F0,0B0\n")] {
        on_ranks(2, "unlike copies", move |ctx| -> Result<()> {
            let own = (weight()? + ctx.rank() as f64)?;
            let pipe = tied::<Vb>(|vb| Ok(vb.get((3, 3), "tied")?))?;
            let scope = builder(&HashMap::from([("part.tied".into(), own)]), DType::F64)?;
            let runtime = Runtime::new(&pipe, &Schedule::from_csv(csv)?, ctx.group(), &scope, &device())?;
            let stage = runtime.stages().next().unwrap();
            assert_eq!(
                numbers(&stage.parameters()["part.tied"])?,
                numbers(&(weight()? + f64::from(first))?)?
            );
            Ok(())
        });
    }
}

#[test]
fn copies_of_which_some_are_frozen_are_refused_by_all() {
    let texts = on_ranks(2, "frozen copies", |ctx| -> Result<String> {
        let tensors = HashMap::from([("part.tied".to_string(), weight()?)]);
        let scope = match ctx.rank() {
            0 => builder(&tensors, DType::F64)?,
            _ => Vb::from_tensors(tensors, DType::F64, &device()),
        };
        let pipe = tied::<Vb>(|vb| Ok(vb.get((3, 3), "tied")?))?;
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        let refused = Runtime::new(&pipe, &schedule, ctx.group(), &scope, &device()).map(drop);
        Ok(refused.unwrap_err().to_string())
    });
    texts.iter().for_each(|text| assert!(text.contains("part.tied"), "{text}"));
}

#[test]
fn a_parameter_is_not_built_from_another_whose_name_only_ends_alike() {
    let pipe = tied::<Vb>(|vb| Ok(vb.pp("apart").get((3, 3), "tied")?)).unwrap();
    let scope = builder(&HashMap::new(), DType::F64).unwrap();
    let error = LocalPipe::new(&pipe, &scope, &device()).map(drop).unwrap_err().to_string();
    assert_eq!(error, r#"pipe: parameter "part.tied" is built from "part.apart.tied""#);
}

#[test]
fn variables_that_no_scope_knows_have_gradients() {
    on_ranks(2, "captured", |ctx| -> Result<()> {
        let own = Var::from_tensor(&weight()?)?;
        let mut g = PipeBuilder::<()>::new();
        let x = g.input("x", In::Arg);
        let captured = own.as_tensor().clone();
        let h = g.func("in", move |xs, _| Ok(xs[0].tensor()?.matmul(&captured)?.into()), [x]);
        g.split();
        g.loss_fn(mean_square, [h], LossReduction::Mean);
        let pipe = g.finish(SplitSpec::declared())?;
        let want =
            LocalPipe::new(&pipe, &(), &device())?.forward_backward(&rows()?, &StepOptions::default())?;
        let schedule = ScheduleKind::ZbH1.schedule(2, 2, 1)?;
        let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &(), &device())?;
        let got = runtime.forward_backward(&rows()?, &StepOptions::default())?.step;
        match (ctx.rank(), got.grads.get(&own)) {
            (0, Some(got)) => assert_eq!(numbers(got)?, numbers(want.grads.get(&own).unwrap())?),
            (0, None) => panic!("no gradient"),
            _ => {}
        }
        Ok(())
    });
}

/// Four nodes, each pair of which uses one layer: the second and the third ask for it by one name, undeclared.
fn undeclared(stages: usize) -> Result<Pipe<Vb>> {
    let mut g = PipeBuilder::<Vb>::new();
    let x = g.input("x", In::Arg);
    let layer = g.shared_module("layer", |vb| Ok(linear_no_bias(3, 3, vb.clone())?));
    let h = g.call(layer, "first", [x]);
    let h = g.module("a", |vb| Ok(linear_no_bias(3, 3, vb.pp("b"))?), [h]);
    let h = g.func("tanh", |xs, _| Ok(xs[0].tensor()?.tanh()?.into()), [h]);
    let h = g.module("a.b", |vb| Ok(linear_no_bias(3, 3, vb.clone())?), [h]);
    let y = g.call(layer, "last", [h]);
    g.output("y", y);
    g.loss_fn(mean_square, [y], LossReduction::Mean);
    g.finish(EqualCount(stages))
}

#[test]
fn modules_of_several_stages_have_the_whole_gradient_declared_or_not() {
    let values = || -> Result<HashMap<String, Tensor>> {
        let other = (weight()? * 0.7)?;
        Ok(HashMap::from([("a.b.weight".to_string(), weight()?), ("layer.weight".into(), other)]))
    };
    type Case = (usize, ScheduleKind, usize, Option<&'static [usize]>);
    let cases: [Case; 5] = [
        (1, ScheduleKind::OneFOneB, 1, None),
        (2, ScheduleKind::OneFOneB, 2, Some(&[0, 1])),
        (3, ScheduleKind::ZbH1, 3, Some(&[0, 1])),
        (4, ScheduleKind::ZbH1, 4, Some(&[0, 1])),
        (2, ScheduleKind::Zbv, 4, Some(&[0, 1])),
    ];
    for (ranks, kind, stages, found_in) in cases {
        on_ranks(ranks, &format!("{kind} on {ranks}"), move |ctx| -> Result<()> {
            let local = LocalPipe::new(&undeclared(1)?, &builder(&values()?, DType::F64)?, &device())?;
            let want = local.forward_backward(&rows_in(4)?, &StepOptions::default())?;
            let schedule = kind.schedule(ranks, 4, stages / ranks)?;
            let pipe = undeclared(stages)?;
            let scope = builder(&values()?, DType::F64)?;
            let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &scope, &device())?;
            let found = runtime.info().shares.iter().find(|share| share.name == "a.b.weight");
            assert_eq!(found.map(|share| share.stages.as_slice()), found_in, "{kind} on {ranks}");
            let got = runtime.forward_backward(&rows_in(4)?, &StepOptions::default())?.step;
            for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
                let (got, want) =
                    (got.grads.get(parameter), want.grads.get(local.parameters()[name.as_str()]));
                let (got, want) = (numbers(got.expect("a gradient"))?, numbers(want.expect("a gradient"))?);
                let off = got.iter().zip(&want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(off < 1e-12, "gradient of {name} on rank {} is off by {off}", ctx.rank());
            }
            Ok(())
        });
    }
}

#[test]
fn shared_modules_that_bring_variables_along_are_refused_by_all() {
    let texts = on_ranks(3, "brought along", |ctx| -> Result<String> {
        let mut g = PipeBuilder::<()>::new();
        let mut h = g.input("x", In::Arg);
        let layer = g.shared_module("layer", |()| {
            Ok(candle_nn::Linear::new(Var::from_tensor(&weight()?)?.into_inner(), None))
        });
        h = g.call(layer, "first", [h]);
        h = g.func("between", |xs, _| Ok(xs[0].clone()), [h]);
        h = g.call(layer, "last", [h]);
        g.loss_fn(mean_square, [h], LossReduction::Mean);
        let schedule = ScheduleKind::OneFOneB.schedule(3, 2, 1)?;
        let pipe =
            g.finish(SplitSpec::at([("between", SplitPoint::Beginning), ("last", SplitPoint::Beginning)]))?;
        Ok(Runtime::new(&pipe, &schedule, ctx.group(), &(), &device()).map(drop).unwrap_err().to_string())
    });
    texts.iter().for_each(|text| assert!(text.contains("asks its scope for no parameters"), "{text}"));
}

#[test]
fn a_parameter_that_only_some_stages_declare_as_shared_is_refused_by_all() {
    let texts = on_ranks(3, "half declared", |ctx| -> Result<String> {
        let mut g = PipeBuilder::<Vb>::new();
        let x = g.input("x", In::Arg);
        let tied = g.parameter("tied", Share::Replicate, |vb| Ok(vb.get((3, 3), "tied")?));
        let h = g.func("in", product, [x, tied]);
        g.split();
        let h = g.func("out", product, [h, tied]);
        g.split();
        let build = |vb: &Vb| {
            let tied = vb.root().get((3, 3), "tied")?;
            Ok(candle_pipe::stage_op(move |xs, _| Ok(vec![xs[0].tensor()?.matmul(&tied)?.into()])))
        };
        let y = g.module("last", build, [h]);
        g.loss_fn(mean_square, [y], LossReduction::Mean);
        let scope = builder(&HashMap::from([("tied".into(), weight()?)]), DType::F64)?;
        let schedule = ScheduleKind::OneFOneB.schedule(3, 2, 1)?;
        let pipe = g.finish(SplitSpec::declared())?;
        Ok(Runtime::new(&pipe, &schedule, ctx.group(), &scope, &device()).map(drop).unwrap_err().to_string())
    });
    texts
        .iter()
        .for_each(|text| assert!(text.contains("\"tied\"") && text.contains("declared one"), "{text}"));
}

#[test]
fn a_loss_that_is_no_scalar_fails_on_all_ranks_in_evaluation_too() {
    on_ranks(2, "loss", |ctx| -> Result<()> {
        let mut g = PipeBuilder::<()>::new();
        let x = g.input("x", In::Arg);
        let h = g.func("in", |xs, _| Ok(xs[0].clone()), [x]);
        g.split();
        let loss = g.func("out", |xs, _| Ok(xs[0].clone()), [h]);
        g.loss(loss, LossReduction::Mean);
        let pipe = g.finish(SplitSpec::declared())?;
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &(), &device())?;
        let error = runtime.evaluate(&rows()?, &StepOptions::default()).map(drop).unwrap_err().to_string();
        assert!(error.contains("expected a scalar of floats"), "{error}");
        Ok(())
    });
}

#[test]
fn training_by_a_schedule_without_backwards_is_refused_before_anything_runs() {
    on_ranks(1, "forward only", |ctx| -> Result<()> {
        let pipe = tied::<()>(|()| weight())?;
        let schedule = ScheduleKind::LoopedBfs.schedule(1, 2, 2)?.forward_only();
        let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &(), &device())?;
        runtime.evaluate(&rows()?, &StepOptions::default())?;
        let error =
            runtime.forward_backward(&rows()?, &StepOptions::default()).map(drop).unwrap_err().to_string();
        assert!(error.contains("no backward passes"), "{error}");
        Ok(())
    });
}

/// Idle steps are no backward passes.
#[test]
fn a_model_without_loss_takes_a_schedule_of_forwards_with_gaps() {
    on_ranks(2, "gaps", |ctx| -> Result<()> {
        let mut g = PipeBuilder::<()>::new();
        let x = g.input("x", In::Arg);
        let h = g.func("in", |xs, _| Ok(xs[0].clone()), [x]);
        g.split();
        let y = g.func("out", |xs, _| Ok(xs[0].clone()), [h]);
        g.output("y", y);
        let pipe = g.finish(SplitSpec::declared())?;
        let schedule = Schedule::from_csv("0F0,0F1,\n,1F0,1F1\n")?;
        let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &(), &device())?;
        assert_eq!(runtime.evaluate(&rows()?, &StepOptions::default())?.step.outputs.len(), 2);
        Ok(())
    });
}

/// Two stages of one rank that nobody told of the variable that they both use.
#[test]
fn a_variable_of_two_stages_is_averaged_over_replicas_with_all_of_its_gradient() {
    let gradients = on_ranks(2, "captured twice", |ctx| -> Result<Vec<f64>> {
        let mesh = ctx.mesh(&[("pp", 1), ("dp", 2)])?;
        let mut g = PipeBuilder::<Vb>::new();
        let mut h = g.input("x", In::Arg);
        for stage in 0..2 {
            h = g.module(&format!("layers.{stage}"), |vb| Ok(linear_no_bias(3, 3, vb.root())?), [h]);
            if stage == 0 {
                g.split();
            }
        }
        g.loss_fn(mean_square, [h], LossReduction::Mean);
        let pipe = g.finish(SplitSpec::declared())?;
        let scope = || builder(&HashMap::from([("weight".into(), weight()?)]), DType::F64);
        let local = LocalPipe::new(&pipe, &scope()?, &device())?;
        let want = local.forward_backward(&rows()?, &StepOptions::default())?.grads;
        let want = numbers(want.get(local.parameters()["weight"]).unwrap())?;

        let schedule = ScheduleKind::LoopedBfs.schedule(1, 2, 2)?;
        let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &scope()?, &device())?;
        let runtime = runtime.with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?;
        let got = runtime.forward_backward(&rows()?, &StepOptions::default())?.step.grads;
        let parameter = runtime.stages().next().unwrap().parameters()["weight"].clone();
        let got = numbers(got.get(&parameter).unwrap())?;
        Ok(got.iter().zip(&want).map(|(a, b)| (a - b).abs()).collect())
    });
    assert!(gradients.concat().into_iter().all(|off| off < 1e-12), "{gradients:?}");
}

#[test]
fn an_output_that_is_a_parameter_stays_as_it_is_when_the_parameter_changes() {
    on_ranks(2, "aliases", |ctx| -> Result<()> {
        let mut g = PipeBuilder::<Vb>::new();
        let x = g.input("x", In::Arg);
        let gate = g.parameter("gate", Share::Transmit, |vb| Ok(vb.get((3, 3), "gate")?));
        let h = g.func("in", product, [x, gate]);
        g.split();
        let y = g.func("out", product, [h, gate]);
        g.output("gate", gate);
        g.loss_fn(mean_square, [y], LossReduction::Mean);
        let pipe = g.finish(SplitSpec::declared())?;
        let scope = builder(&HashMap::from([("gate".into(), weight()?)]), DType::F64)?;
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &scope, &device())?;
        let made = runtime.forward_backward(&rows()?, &StepOptions::default())?.step;
        for parameter in runtime.stages().flat_map(|stage| stage.parameters().values()) {
            Var::from_tensor(parameter)?.set(&parameter.zeros_like()?)?;
        }
        ctx.group().barrier()?;
        for output in &made.outputs {
            if let Ok(gate) = output.get("gate") {
                assert_eq!(numbers(gate.tensor()?)?, numbers(&weight()?)?);
            }
        }
        Ok(())
    });
}
