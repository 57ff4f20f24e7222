//! Losses that outputs say, modules that several nodes use, lists of candle's modules.
use crate::graph::common::{Args, Builder, Plain, Vb, build, fault, numbers, same};
use candle_core::{DType, Device, Result, Tensor};
use candle_nn::{Module, VarBuilder, VarMap};
use candle_pipe::microbatch::{ChunkSpec, CustomReducer, LossReducer, TensorChunkSpec};
use candle_pipe::nn::{Sequential, seq};
use candle_pipe::{
    EqualCount, EqualParams, In, Kwargs, LocalPipe, LossReduction, LossSpec, SplitSpec, StepOptions, Value,
};
use std::collections::BTreeMap;

/// Outputs `y`, and `result` with a sum of squares in it.
fn squares(g: &mut Builder) {
    let x = g.input("x", In::Arg);
    let h = g.module("up", |vb| Ok(candle_pipe::nn::linear(3, 4, vb.clone())?), [x]);
    let f = |xs: &[Value], _: &candle_pipe::Ctx| {
        let y = xs[0].tensor()?.tanh()?;
        let sum = y.sqr()?.sum_all()?;
        Ok([
            y.into(),
            BTreeMap::from([("sums", Value::from(vec![sum])), ("note", "of squares".into())]).into(),
        ])
    };
    let [y, result] = g.func_many("squares", f, [h]);
    g.output("y", y);
    g.output("result", result);
}

fn plain_squares(vb: &Vb, args: &Args) -> Result<Plain> {
    let y = candle_nn::linear(3, 4, vb.pp("up"))?.forward(args.args[0].tensor().unwrap())?.tanh()?;
    Ok((BTreeMap::from([("y".into(), y.clone())]), y.sqr()?.sum_all()?))
}

fn rows(n: usize) -> Args {
    Args { args: vec![numbers("x", &[n, 3]).into()], ..Args::default() }
}

/// A spec for the outputs of `squares`.
fn in_result<T: From<Vec<T>> + From<BTreeMap<String, T>>>(
    loss: T,
    no: impl Fn() -> T,
) -> BTreeMap<String, T> {
    let sums = BTreeMap::from([("sums".to_owned(), T::from(vec![loss])), ("note".into(), no())]);
    BTreeMap::from([("y".to_owned(), no()), ("result".into(), sums.into())])
}

#[test]
fn an_output_named_loss_is_the_loss() {
    let declare = || {
        let mut g = Builder::new();
        let x = g.input("x", In::Arg);
        let h = g.module("up", |vb| Ok(candle_pipe::nn::linear(3, 4, vb.clone())?), [x]);
        let y = g.func("tanh", |xs, _| Ok(xs[0].tensor()?.tanh()?.into()), [h]);
        let mean = g.func("mean", |xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?.into()), [y]);
        g.output("y", y);
        g.output("loss", mean);
        g
    };
    let plain = |vb: &Vb, args: &Args| {
        let (outputs, _) = plain_squares(vb, args)?;
        let mean = outputs["y"].sqr()?.mean_all()?;
        Result::<Plain>::Ok((outputs, mean))
    };
    for stages in 1..=3 {
        let pipe = declare().finish(EqualCount(stages)).unwrap();
        assert_eq!(pipe.info().graph.loss.map(|loss| loss.reduction), Some(LossReduction::Mean));
        let built = build(&pipe);
        let local = &built.local;
        let (_, want) = plain(&built.vb, &rows(5)).unwrap();
        let grads = want.backward().unwrap();
        for chunks in 1..=4 {
            let step = local.forward_backward(&rows(5).split(chunks), &Default::default()).unwrap();
            crate::graph::common::assert_close("loss", step.loss().unwrap(), &want);
            for (name, var) in built.parameters.data().lock().unwrap().iter() {
                let (got, want) = (step.grads.get(var).unwrap(), grads.get(var).unwrap());
                crate::graph::common::assert_close(name, got, want);
            }
        }
    }
    // What is said goes before what is found.
    let mut g = declare();
    g.loss_spec(false, LossReduction::Mean);
    assert_eq!(g.finish(EqualCount(2)).unwrap().info().graph.loss, None);
    let mut g = declare();
    let y = g.graph().outputs[0].value;
    let sum = g.func("sum", |xs, _| Ok(xs[0].tensor()?.sum_all()?.into()), [y]);
    g.loss(sum, LossReduction::Sum);
    assert_eq!(g.finish(EqualCount(2)).unwrap().info().graph.loss.unwrap().value, sum);
}

#[test]
fn a_tree_of_truths_says_which_value_is_the_loss() {
    for stages in 1..=4 {
        let mut g = Builder::new();
        squares(&mut g);
        g.loss_spec(in_result(LossSpec::from(true), || false.into()), LossReduction::Sum);
        let built = build(&g.finish(EqualCount(stages.min(3))).unwrap());
        let (_, want) = plain_squares(&built.vb, &rows(5)).unwrap();
        let step = built.step(&rows(5), stages, &Default::default());
        crate::graph::common::assert_close("loss", step.loss().unwrap(), &want);
    }
    // The first of two outputs, by place.
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let sum = g.func("sum", |xs, _| Ok(xs[0].tensor()?.sum_all()?.into()), [x]);
    g.output("total", sum);
    let y = g.func("y", same, [x]);
    g.output("y", y);
    g.loss_spec([true, false], LossReduction::Sum);
    let pipe = g.finish(SplitSpec::declared()).unwrap();
    assert_eq!((pipe.info().graph.loss.unwrap().value, pipe.info().graph.nodes.len()), (sum, 2));
}

#[test]
fn the_reducer_of_a_chunk_spec_marks_the_loss() {
    let spec = |reducer: LossReducer| {
        let spec: ChunkSpec = in_result(ChunkSpec::Loss(reducer), || TensorChunkSpec(0).into()).into();
        let mut g = Builder::new();
        squares(&mut g);
        g.loss_by_reducer(&spec);
        g.finish(EqualCount(2))
    };
    let loss = |reducer| spec(reducer).unwrap().info().graph.loss.unwrap().reduction;
    assert_eq!(loss(LossReducer::sum_reducer()), LossReduction::Sum);
    assert_eq!(loss(LossReducer::mean_reducer()), LossReduction::Mean);
    let own = CustomReducer::new(0.0, |a, _| Ok(a));
    let error = spec(LossReducer::custom(own)).unwrap_err().to_string();
    assert!(error.contains("has a loss reducer of its own kind; give LossReducer::sum_reducer()"), "{error}");
}

#[test]
fn losses_that_cannot_be_are_refused_when_the_model_is_declared() {
    let refuse = |spec: LossSpec| {
        fault(|g| {
            squares(g);
            g.loss_spec(spec, LossReduction::Sum);
            SplitSpec::declared()
        })
    };
    let map = |entries: &[(&str, bool)]| -> LossSpec {
        entries.iter().map(|&(name, is_loss)| (name, is_loss)).collect::<BTreeMap<_, _>>().into()
    };
    let wants = [
        (true.into(), "stands for 2 losses in the outputs [y, result]"),
        ((false, false).into(), "has no true in it"),
        ([true].into(), "[true] has 1 entries for the 2 outputs [y, result]"),
        (map(&[("y", true), ("results", false)]), "names \"results\", which is not one of the outputs"),
        (map(&[("y", true)]), "leaves out the output \"result\""),
        ((true, (false, true)).into(), "stands for 2 losses"),
    ];
    for (spec, want) in wants {
        let error = refuse(spec);
        assert!(error.starts_with("pipe: the loss spec ") && error.contains(want), "{error}");
    }
    let counted = fault(|g| {
        let x = g.input("x", In::Arg);
        g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sum_all()?), [x], LossReduction::Counted);
        SplitSpec::declared()
    });
    assert!(counted.contains("use loss_counted"), "{counted}");
    let twice = fault(|g| {
        squares(g);
        let y = g.graph().outputs[0].value;
        g.loss(y, LossReduction::Sum);
        g.loss_spec((true, false), LossReduction::Sum);
        SplitSpec::declared()
    });
    assert!(twice.contains("two losses"), "{twice}");
    // The structure within a value is known when it is there.
    let mut g = Builder::new();
    squares(&mut g);
    g.loss_spec((false, (true, false)), LossReduction::Sum);
    let built = build(&g.finish(EqualCount(1)).unwrap());
    let error = built.local.evaluate(&rows(2).split(1), &StepOptions::default()).unwrap_err().to_string();
    assert!(
        error.contains("node \"loss\"")
            && error.contains("does not have the structure of the loss spec (true, false)"),
        "{error}"
    );
}

#[test]
fn modules_of_one_tensor_with_other_numbers_are_refused_when_the_model_is_declared() {
    let error = fault(|g| {
        let x = g.input("x", In::Arg);
        let y = g.module("up", |vb| Ok(candle_nn::linear(3, 4, vb.clone())?), [x, x]);
        g.output("y", y);
        SplitSpec::declared()
    });
    let want =
        "node \"up\" is a module that takes 1 tensor and gives 1, declared with 2 inputs and 1 results";
    assert!(error.contains(want), "{error}");
    let error = fault(|g| {
        let x = g.input("x", In::Arg);
        let layer = g.shared_module("layer", |vb| Ok(candle_nn::linear(3, 4, vb.clone())?));
        let y = g.call(layer, "up", [x, x]);
        g.output("y", y);
        SplitSpec::declared()
    });
    assert!(
        error.contains("node \"up\" calls a module that takes 1 tensor with 2 inputs; use call_with"),
        "{error}"
    );
}

/// One layer up, down and up again, and a loss.
fn declare_shared() -> Builder {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let layer =
        g.scope("part", |g| g.shared_module("layer", |vb| Ok(candle_pipe::nn::linear(3, 4, vb.clone())?)));
    let h = g.call(layer, "up", [x]);
    let down = |layer: &candle_pipe::nn::Linear, xs: &[Value], _: &candle_pipe::Ctx| {
        Ok(xs[0].tensor()?.matmul(layer.weight())?.tanh()?.into())
    };
    let h = g.call_with(layer, "down", down, [h]);
    let y = g.call(layer, "up_again", [h]);
    g.output("y", y);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
    g
}

fn plain_shared(vb: &Vb, args: &Args) -> Result<Plain> {
    let layer = candle_nn::linear(3, 4, vb.pp("part.layer"))?;
    let h = layer.forward(args.args[0].tensor().unwrap())?.matmul(layer.weight())?.tanh()?;
    let y = layer.forward(&h)?;
    Ok((BTreeMap::from([("y".into(), y.clone())]), y.sqr()?.mean_all()?))
}

#[test]
fn a_module_shared_by_several_places() {
    for stages in 1..=4 {
        let pipe = declare_shared().finish(EqualCount(stages)).unwrap();
        assert_eq!(pipe.shares().len(), usize::from(stages > 1), "{pipe}");
        assert!(pipe.to_string().contains("part.layer() (shared module)"), "{pipe}");
        build(&pipe).check(&rows(5), plain_shared);
    }
    let foreign = || {
        let layer = declare_shared().shared_module("other", |_| Ok(candle_nn::Activation::Relu));
        let mut g = Builder::new();
        let x = g.input("x", In::Arg);
        let y = g.call(layer, "y", [x]);
        g.output("y", y);
        g.finish(EqualCount(1)).unwrap_err().to_string()
    };
    assert!(foreign().contains("which nothing makes"), "{}", foreign());
}

/// A model as written for candle; only the type of the list differs.
fn model(vb: &Vb) -> Result<Sequential> {
    let norm = vb.get(4, "scale")?;
    Ok(seq()
        .add(candle_nn::linear(3, 4, vb.pp("up"))?)
        .add_fn(|x| x.tanh())
        .add_fn(move |x| x.broadcast_mul(&norm))
        .add(candle_nn::linear_no_bias(4, 2, vb.pp("down"))?))
}

fn declare_layers(count: usize) -> Builder {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let example = Tensor::zeros((1, 3), DType::F64, &Device::Cpu).unwrap();
    let y = g.scope("net", |g| g.layers("layers", count, &example, |vb| Ok(model(vb)?), x));
    g.output("y", y);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [y], LossReduction::Mean);
    g
}

#[test]
fn a_list_of_candle_modules_is_a_pipe() {
    let plain = |vb: &Vb, args: &Args| {
        let y = model(&vb.pp("net"))?.forward(args.args[0].tensor().unwrap())?;
        Ok((BTreeMap::from([("y".into(), y.clone())]), y.sqr()?.mean_all()?))
    };
    let names = |pipe: &candle_pipe::Pipe<Vb>, vb: &Vb| -> Vec<Vec<String>> {
        let stage =
            |index| pipe.build_stage(index, vb, &Device::Cpu).unwrap().parameters().keys().cloned().collect();
        (0..pipe.num_stages()).map(stage).collect()
    };
    for stages in 1..=5 {
        let pipe = declare_layers(4).finish(EqualCount(stages)).unwrap();
        let built = build(&pipe);
        built.check(&rows(5), plain);
        if stages == 5 {
            let want: [&[&str]; 5] =
                [&["net.up.bias", "net.up.weight"], &[], &["net.scale"], &["net.down.weight"], &[]];
            assert_eq!(names(&pipe, &built.vb), want);
        }
    }
    let mut g = declare_layers(4);
    let map = VarMap::new();
    g.measure(&VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu)).unwrap();
    let weights: Vec<_> = g.graph().nodes.iter().map(|node| node.weight).collect();
    assert_eq!(weights, [16, 0, 4, 8, 0].map(Some));
    assert_eq!(g.finish(EqualParams(2)).unwrap().num_stages(), 2);

    let wrong = declare_layers(3).finish(EqualCount(1)).unwrap();
    let vb = VarBuilder::from_varmap(&map, DType::F64, &Device::Cpu);
    let error = LocalPipe::new(&wrong, &vb, &Device::Cpu).map(drop).unwrap_err().to_string();
    assert!(error.contains("the list \"net.layers\" has 4 modules, declared with 3; declare 4"), "{error}");
    let error = declare_layers(4).measure(&candle_pipe::shapes_only(DType::F64)).unwrap_err().to_string();
    assert!(error.contains("measure with a builder of variables"), "{error}");
}

#[test]
fn a_pipe_is_compared_with_the_plain_model_in_one_call() {
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F64, &Device::Cpu);
    let args = rows(5).args;
    type Plain<'a> = &'a dyn Fn(&Vb, &[Value], &Kwargs) -> candle_pipe::Result<Kwargs>;
    let check = |stages, plain: Plain<'_>| {
        let pipe = declare_shared().finish(EqualCount(stages)).unwrap();
        pipe.check_against(&vb, &Device::Cpu, &args, &Kwargs::new(), 1e-12, plain)
            .map_err(|error| error.to_string())
    };
    let results = |vb: &Vb, args: &[Value]| -> candle_pipe::Result<Kwargs> {
        let (outputs, loss) = plain_shared(vb, &Args { args: args.to_vec(), ..Args::default() })?;
        let outputs = outputs.into_iter().map(|(name, output)| (name, output.into()));
        Ok(outputs.chain([("loss".to_owned(), loss.into())]).collect())
    };
    for stages in 1..=4 {
        check(stages, &|vb, args, _| results(vb, args)).unwrap();
    }
    let differs = |plain: Plain<'_>| check(2, plain).unwrap_err();

    // A gradient alone: the same numbers, of which one is detached.
    let error = differs(&|vb, args, _| {
        let mut made = results(vb, args)?;
        let weight = vb.pp("part.layer").get((4, 3), "weight")?;
        let loss = (made["loss"].tensor()? + (weight.sum_all()? - weight.detach().sum_all()?)?)?;
        made.insert("loss".into(), loss.into());
        Ok(made)
    });
    assert!(
        error.contains("the gradient of part.layer.weight is off by 1") && !error.contains("output"),
        "{error}"
    );
    // A parameter that one of them has, an output that has another shape, and one that is a NaN.
    let error = differs(&|vb, args, _| {
        let mut made = results(vb, args)?;
        let extra = vb.get(1, "extra")?;
        made.insert("loss".into(), (made["loss"].tensor()? + (extra.sum_all()? * 0.0)?)?.into());
        made.insert("y".into(), made["y"].tensor()?.narrow(0, 0, 2)?.into());
        Ok(made)
    });
    assert!(
        error.contains("the parameter extra is only in the plain model")
            && error.contains("output \"y\" is f64[5, 4]"),
        "{error}"
    );
    let error = differs(&|vb, args, _| {
        let mut made = results(vb, args)?;
        made.insert("y".into(), (made["y"].tensor()? * f64::NAN)?.into());
        Ok(made)
    });
    assert!(error.contains("output \"y\" is off by inf"), "{error}");
    let error = differs(&|vb, args, _| {
        let mut made = results(vb, args)?;
        made.remove("loss");
        let y = made.remove("y").unwrap_or(Value::None);
        made.insert("z".into(), y);
        Ok(made)
    });
    for want in [
        "the loss is only in the pipe",
        "output \"y\" is only in the pipe",
        "output \"z\" is only in the plain model",
    ] {
        assert!(error.contains(want), "{error}");
    }
}

#[test]
fn a_list_whose_module_loses_gradients_is_refused() {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let example = Tensor::zeros((1, 3), DType::F32, &Device::Cpu).unwrap();
    let build = |vb: &Vb| {
        let layers: Vec<Box<dyn candle_nn::ModuleT>> = vec![
            Box::new(candle_nn::linear(3, 3, vb.pp("a"))?),
            Box::new(candle_nn::layer_norm(3, 1e-5, vb.pp("norm"))?),
        ];
        Ok(layers)
    };
    let y = g.layers("layers", 2, &example, build, x);
    g.output("y", y);
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F32, &Device::Cpu);
    let error = LocalPipe::new(&g.finish(EqualCount(1)).unwrap(), &vb, &Device::Cpu)
        .map(drop)
        .unwrap_err()
        .to_string();
    assert!(error.contains("has a gradient of \"norm.") && error.contains("such as a fused norm"), "{error}");
}

#[test]
fn an_output_named_loss_that_is_no_loss_is_compared_as_an_output() {
    let pipe = |slope: f64| {
        let mut g = Builder::new();
        let x = g.input("x", In::Arg);
        let y = g.func("scale", move |xs, _| Ok((xs[0].tensor()? * slope)?.into()), [x]);
        g.output("loss", y);
        g.loss_spec(false, LossReduction::Mean);
        g.finish(EqualCount(1)).unwrap()
    };
    let vb = VarBuilder::from_varmap(&VarMap::new(), DType::F64, &Device::Cpu);
    let args = [numbers("x", &[2, 3]).into()];
    let check = |slope: f64, tolerance: f64| {
        let plain = |_: &Vb, args: &[Value], _: &Kwargs| {
            Ok(Kwargs::from([("loss".to_owned(), (args[0].tensor()? * 2.0)?.into())]))
        };
        let checked = pipe(slope).check_against(&vb, &Device::Cpu, &args, &Kwargs::new(), tolerance, plain);
        checked.map_err(|error| error.to_string())
    };
    assert_eq!(check(2.0, 1e-12), Ok(()));
    let text = check(3.0, 1e-12).unwrap_err();
    assert!(text.contains("output \"loss\" is off by"), "{text}");
    let text = check(3.0, f64::NAN).unwrap_err();
    assert!(text.contains("tolerance NaN"), "{text}");
}
