//! Inputs: any number of them by position, defaults by position, and structures of the user between stages.
use crate::graph::common::{Builder, assert_close, fault, numbers, same};
use candle_core::{DType, Device, Tensor};
use candle_dist::TensorTree;
use candle_pipe::microbatch::{Splitter, split_args_kwargs_into_chunks};
use candle_pipe::{
    EqualCount, In, Kwargs, LocalPipe, LossReduction, PipeBuilder, Result, Share, SplitPoint, SplitSpec,
    StepOptions, Value, nn,
};

/// The sum of all arguments but the first, each times the scale, joined to the first one.
fn joined() -> PipeBuilder<()> {
    let mut g = PipeBuilder::<()>::new();
    let (x, scale) = (g.input("x", In::Arg), g.input_arg_or("scale", 2.0));
    let rest = g.input("rest", In::Args);
    let add = |xs: &[Value], _: &candle_pipe::Ctx| {
        let mut sum = xs[0].tensor()?.clone();
        for x in xs[1].items()? {
            sum = (sum + (x.tensor()? * xs[2].float()?)?)?;
        }
        Ok(sum.into())
    };
    let y = g.func("add", add, [x, rest, scale]);
    let z = g.func("count", |xs, _| Ok((xs[0].tensor()? + xs[1].items()?.len() as f64)?.into()), [y, rest]);
    g.output("y", z);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.sum_all()?), [z], LossReduction::Sum);
    g
}

#[test]
fn any_number_of_arguments_by_position_and_defaults_among_them() -> Result<()> {
    let x: Vec<Tensor> = (0..4).map(|i| numbers(&format!("x{i}"), &[3, 2])).collect();
    for stages in 1..=3 {
        let local = LocalPipe::new(&joined().finish(EqualCount(stages))?, &(), &Device::Cpu)?;
        let forward = |args: &[Value], kwargs: &[(&str, Value)]| {
            let kwargs = kwargs.iter().map(|(name, value)| ((*name).to_owned(), value.clone())).collect();
            local.forward(args, &kwargs).map(|outputs| outputs["y"].tensor().unwrap().clone())
        };
        let want = |scale: f64, count: usize| -> Result<Tensor> {
            let mut sum = x[0].clone();
            for x in &x[1..=count] {
                sum = (sum + (x * scale)?)?;
            }
            Ok((sum + count as f64)?)
        };
        let value = |i: usize| Value::from(&x[i]);
        assert_close("one", &forward(&[value(0)], &[])?, &want(2.0, 0)?);
        assert_close("the default by position", &forward(&[value(0), 3.0.into()], &[])?, &want(3.0, 0)?);
        let all = [value(0), 0.5.into(), value(1), value(2), value(3)];
        assert_close("all", &forward(&all, &[])?, &want(0.5, 3)?);
        let named = [("rest", Value::from(vec![value(1), value(2)])), ("scale", 4.0.into())];
        assert_close("by name", &forward(&[value(0)], &named)?, &want(4.0, 2)?);
        let said = forward(&all, &[("rest", Value::from(vec![value(1)]))]).unwrap_err().to_string();
        assert_eq!(said, "pipe: input \"rest\" is given by place and by name");
        // They are cut into rows as all arguments are, masked or not.
        let whole = split_args_kwargs_into_chunks(&all, &Kwargs::new(), 1, None, None)?;
        let want = local.forward_backward(&whole, &StepOptions::default())?;
        for batch in [
            Splitter::new(3).split(&all, &Kwargs::new(), None, None)?,
            Splitter::new(2).masked().split(&all, &Kwargs::new(), None, None)?,
        ] {
            let step = local.forward_backward(&batch, &StepOptions::default())?;
            assert_close("the loss", step.loss()?, want.loss()?);
        }
    }
    assert!(joined().finish(EqualCount(1))?.to_string().starts_with("pipe(x, scale?, ..rest): 1 stages"));
    let said = fault(|g| {
        let (a, b) = (g.input("a", In::Args), g.input("b", In::Args));
        let y = g.func("y", same, [a, b]);
        g.output("y", y);
        SplitSpec::declared()
    });
    assert!(said.contains("the inputs \"a\" and \"b\" both take all arguments"), "{said}");
    Ok(())
}

#[derive(TensorTree)]
struct State {
    hidden: Tensor,
    memory: Vec<Option<Tensor>>,
    layers: usize,
}

#[test]
fn structures_of_the_user_pass_between_stages() -> Result<()> {
    let run = |stages: usize| -> Result<Vec<Tensor>> {
        let mut g = Builder::new();
        let x = g.input("x", In::Arg);
        let h = g.module("up", |vb| Ok(nn::linear(4, 4, vb.clone())?), [x]);
        let pack = |xs: &[Value], _: &candle_pipe::Ctx| {
            let hidden = xs[0].tensor()?;
            let state = State { hidden: hidden.tanh()?, memory: vec![None, Some(hidden.sqr()?)], layers: 3 };
            Ok((Value::of_tree(&state), state.layers).into())
        };
        let state = g.func("pack", pack, [h]);
        let unpack = |xs: &[Value], _: &candle_pipe::Ctx| {
            let none = Tensor::zeros(0, DType::F64, &Device::Cpu)?;
            let like = State {
                hidden: none.clone(),
                memory: vec![None, Some(none)],
                layers: xs[0].at(1)?.int()? as usize,
            };
            let state = xs[0].at(0)?.to_tree(&like)?;
            let memory = state.memory[1].as_ref().expect("the structure has it");
            Ok((state.hidden + (memory * state.layers as f64)?)?.into())
        };
        let h = g.func("unpack", unpack, [state]);
        let y = g.module("down", |vb| Ok(nn::linear(4, 2, vb.clone())?), [h]);
        g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
        let built = crate::graph::common::build(&g.finish(EqualCount(stages))?);
        let batch =
            split_args_kwargs_into_chunks(&[numbers("x", &[5, 4]).into()], &Kwargs::new(), 2, None, None)?;
        let step = built.local.forward_backward(&batch, &StepOptions::default())?;
        let grads =
            built.local.named_vars()?.into_iter().map(|(_, var)| step.grads.get(&var).unwrap().clone());
        Ok(grads.collect())
    };
    let want = run(1)?;
    assert_eq!(want.len(), 4);
    for stages in 2..=5 {
        run(stages)?.iter().zip(&want).for_each(|(got, want)| assert_close("a gradient", got, want));
    }
    let said =
        Value::from(vec![numbers("x", &[2])]).to_tree(&(numbers("x", &[2]), numbers("x", &[2]))).unwrap_err();
    assert_eq!(said.to_string(), "value: [f64[2]] holds 1 tensors, the structure holds 2");
    Ok(())
}

#[test]
fn a_split_at_what_stages_share_is_refused_with_the_reason() {
    let declare = |name: &'static str| {
        fault(move |g| {
            let x = g.input("x", In::Arg);
            let layer = g.shared_module("tied.layer", |vb| Ok(nn::linear(4, 4, vb.clone())?));
            let weight = g.parameter("tok.weight", Share::Replicate, |vb| Ok(vb.get(4, "weight")?));
            let h = g.call(layer, "first", [x]);
            let h = g.func(
                "mul",
                |xs, _| Ok(xs[0].tensor()?.broadcast_mul(xs[1].tensor()?)?.into()),
                [h, weight],
            );
            let h = g.call(layer, "second", [h]);
            g.output("y", h);
            SplitSpec::at([(name, SplitPoint::Beginning)])
        })
    };
    for (name, want) in [
        ("tied.layer", "a split at \"tied.layer\", a shared module: "),
        ("tied", "a split at \"tied.layer\", a shared module: "),
        ("tok.weight", "a split at \"tok.weight\", a replicated parameter: "),
    ] {
        let said = declare(name);
        assert!(said.contains(want), "{said}");
        assert!(
            said.contains(if name == "tok.weight" {
                "uses it: \"mul\""
            } else {
                "uses it: \"first\", \"second\""
            }),
            "{said}"
        );
    }
    assert!(declare("tid.layer").starts_with("pipe: nothing to split at is named \"tid.layer\""));
}

#[test]
fn numbers_and_hash_maps_are_values() {
    // A literal is an i32, and sizes and words are integers too.
    let map = std::collections::HashMap::from([("b", 2u32), ("a", 1)]);
    let value = Value::from((1, 2usize, 3u8, -4i8, 5i64, 0.5f32, usize::MAX, map));
    assert_eq!(value.to_string(), format!("(1, 2, 3, -4, 5, 0.5, {}, {{a: 1, b: 2}})", i64::MAX));
}
