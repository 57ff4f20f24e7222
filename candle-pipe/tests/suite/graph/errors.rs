//! What is wrong is said in one clear error.
use crate::graph::common::{Builder, build, fault, numbers, same};
use crate::graph::models::{blocks, skips, skips_args};
use candle_core::{DType, Device, Tensor};
use candle_pipe::graph::{Graph, NodeKind};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::{
    Activation, EqualCount, Error, Gradient, In, Keep, Kwargs, LossReduction, Result, Share, SplitPoint,
    SplitPolicy, SplitSpec, StepOptions, Value, nn,
};

/// `x` through `a` and `b`, as an output.
fn two(g: &mut Builder) {
    let x = g.input("x", In::Arg);
    let a = g.func("part.a", same, [x]);
    let b = g.func("part.b", same, [a]);
    g.output("y", b);
}

#[test]
fn declarations() {
    struct Cuts(Vec<usize>);
    impl SplitPolicy for Cuts {
        fn cuts(&self, _: &Graph) -> Result<Vec<usize>> {
            Ok(self.0.clone())
        }
    }
    type Declare = Box<dyn Fn(&mut Builder) -> SplitSpec>;
    let at = |name: &'static str, point| -> Declare {
        Box::new(move |g| {
            two(g);
            SplitSpec::at([(name, point)])
        })
    };
    let by = |cuts: &'static [usize]| -> Declare {
        Box::new(|g| {
            two(g);
            Cuts(cuts.to_vec()).into()
        })
    };
    let with = |change: fn(&mut Builder)| -> Declare {
        Box::new(move |g| {
            two(g);
            change(g);
            SplitSpec::declared()
        })
    };
    let faults: Vec<(Declare, &str)> = vec![
        (at("part.c", SplitPoint::End), "nothing to split at is named \"part.c\" (did you mean \"part.a\"?)"),
        (at("parts", SplitPoint::End), "nothing to split at is named \"parts\" (did you mean \"part\"?)"),
        (
            at("part", SplitPoint::Beginning),
            "a split before \"part\" would leave an empty stage: nothing is before it",
        ),
        (
            at("part.b", SplitPoint::End),
            "a split behind \"part.b\" would leave an empty stage: nothing is behind it",
        ),
        (by(&[0]), "stage 0 would be empty: 2 stages of 2 nodes"),
        (by(&[1, 1]), "stage 1 would be empty: 3 stages of 2 nodes"),
        (by(&[2]), "stage 1 would be empty: 2 stages of 2 nodes"),
        (
            Box::new(|g| {
                two(g);
                EqualCount(3).into()
            }),
            "3 stages of 2 nodes: expected at least 1 stage, and at most one per node",
        ),
        (
            Box::new(|g| {
                g.split();
                two(g);
                SplitSpec::declared()
            }),
            "stage 0 would be empty: 2 stages of 2 nodes",
        ),
        (
            Box::new(|g| {
                two(g);
                g.split();
                EqualCount(2).into()
            }),
            "the model declares cuts of its own; cut it by those or by a policy, not by both",
        ),
        (Box::new(|_| SplitSpec::declared()), "the model has no nodes"),
        (with(two), "two inputs are named \"x\"; names are unique"),
        (
            with(|g| {
                let value = g.graph().nodes[0].outputs[0];
                g.func("part.b", same, [value]);
            }),
            "two nodes are named \"part.b\"; names are unique",
        ),
        (
            with(|g| {
                let value = g.graph().nodes[0].outputs[0];
                g.output("y", value);
            }),
            "two outputs are named \"y\"; names are unique",
        ),
        (with(|g| _ = g.input("", In::Arg)), "input names must not be empty"),
        (
            with(|g| {
                let value = g.graph().nodes[0].outputs[0];
                // Its parameters would be those of a node named "part.b".
                g.scope("", |g| g.func("part.b", same, [value]));
            }),
            "the node name \".part.b\" has an empty part between dots; name it, or leave it out",
        ),
        (with(|g| _ = g.input("mask", In::Kwarg)), "nothing uses input \"mask\"; leave it out"),
        (
            with(|g| {
                let input = g.graph().inputs[0].value;
                g.output("again", input);
            }),
            "the output \"again\" is the input \"x\"; make it the result of a node, if only of a function",
        ),
        (
            with(|g| {
                let weight = g.parameter("w", Share::Replicate, |vb| Ok(vb.get(1, "w")?));
                g.loss(weight, LossReduction::Sum);
            }),
            "the loss is the replicated parameter \"w\"; make it the result of a node, if only of a function",
        ),
        (
            with(|g| {
                let value = g.graph().nodes[0].outputs[0];
                g.loss(value, LossReduction::Sum);
                g.loss(value, LossReduction::Sum);
            }),
            "the model has two losses; add them up in a function",
        ),
        (
            with(|g| {
                let value = g.graph().nodes[0].outputs[0];
                g.loss_at(value, ".a[b]", LossReduction::Sum);
            }),
            "\".a[b]\" is not a path: expected indexes and keys, as in .losses[0]",
        ),
        (
            Box::new(|g| {
                let x = g.input("x", In::Arg);
                g.func("a", same, [x]);
                SplitSpec::declared()
            }),
            "the model has neither an output nor a loss",
        ),
    ];
    for (declare, want) in faults {
        assert_eq!(fault(declare), format!("pipe: {want}"));
    }
}

#[test]
fn arguments() {
    let local = build(&skips().finish(EqualCount(2)).unwrap()).local;
    let args = skips_args(3);
    let fault = |args: &[Value], kwargs: &Kwargs| local.forward(args, kwargs).unwrap_err().to_string();
    let (x, one) = (args.args[0].clone(), args.args.as_slice());
    assert_eq!(fault(&[], &args.kwargs), "pipe: input \"x\" is missing; give it by place or by name");
    assert_eq!(fault(one, &Kwargs::new()), "pipe: input \"labels\" is missing; give it by name");
    assert_eq!(fault(&[x.clone(), x.clone()], &args.kwargs), "pipe: 2 arguments by place, the model takes 1");
    let with = |name: &str| {
        let mut kwargs = args.kwargs.clone();
        kwargs.insert(name.into(), x.clone());
        kwargs
    };
    assert_eq!(fault(one, &with("x")), "pipe: input \"x\" is given by place and by name");
    assert_eq!(
        fault(one, &with("labls")),
        "pipe: the model has no input \"labls\" (did you mean \"labels\"?)"
    );
    // A positional input may be given by name, and a default left out or not.
    let by_name = local.forward(&[], &with("x")).unwrap();
    assert!(by_name["y"].same(&local.forward(one, &args.kwargs).unwrap()["y"]).unwrap());
    let mut scaled = args.kwargs.clone();
    scaled.insert("scale".into(), 2.0.into());
    assert!(!by_name["y"].same(&local.forward(one, &scaled).unwrap()["y"]).unwrap());
}

#[test]
fn losses() {
    type Loss = fn(&Tensor) -> candle_core::Result<Value>;
    let cases: [(Loss, &str); 3] = [
        (
            |x| Ok(x.into()),
            "pipe: the loss is f64[2, 4]: expected a scalar of floats; reduce it in a function",
        ),
        (
            |x| Ok(x.argmax(1)?.sum_all()?.into()),
            "pipe: the loss is u32[]: expected a scalar of floats; reduce it in a function",
        ),
        (|_| Ok(1.0.into()), "pipe: the loss is 1.0: expected a scalar of floats; reduce it in a function"),
    ];
    for (loss, want) in cases {
        let mut g = Builder::new();
        let x = g.input("x", In::Arg);
        let h = g.module("up", |vb| Ok(nn::linear(4, 4, vb.clone())?), [x]);
        let l = g.func("last", move |xs, _| Ok(loss(xs[0].tensor()?)?), [h]);
        g.loss(l, LossReduction::Sum);
        let local = build(&g.finish(EqualCount(2)).unwrap()).local;
        let batch =
            split_args_kwargs_into_chunks(&[numbers("x", &[2, 4]).into()], &Kwargs::new(), 1, None, None)
                .unwrap();
        assert_eq!(local.forward_backward(&batch, &StepOptions::default()).unwrap_err().to_string(), want);
        assert_eq!(local.evaluate(&batch, &StepOptions::default()).unwrap_err().to_string(), want);
    }
    let mut g = Builder::new();
    two(&mut g);
    let local = build(&g.finish(EqualCount(2)).unwrap()).local;
    let batch =
        split_args_kwargs_into_chunks(&[numbers("x", &[2]).into()], &Kwargs::new(), 1, None, None).unwrap();
    let error = local.forward_backward(&batch, &StepOptions::default()).unwrap_err().to_string();
    assert_eq!(error, "pipe: the model has no loss to differentiate; declare it with loss or loss_fn");
    assert_eq!(
        local.evaluate(&batch, &StepOptions::default()).unwrap().loss().unwrap_err().to_string(),
        "pipe: the model has no loss; declare it with loss or loss_fn"
    );
}

#[test]
fn nodes_fail_by_name() {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let a = g.module("up", |vb| Ok(nn::linear(3, 4, vb.clone())?), [x]);
    let b = g.module("pair", |_| Ok(candle_pipe::stage_op(|xs, _| Ok(vec![xs[0].clone(); 2]))), [a]);
    g.output("y", b);
    let local = build(&g.finish(EqualCount(2)).unwrap()).local;
    let forward = |dims: &[usize]| local.forward(&[numbers("x", dims).into()], &Kwargs::new()).unwrap_err();
    let wrong_width = forward(&[2, 2]);
    assert!(
        matches!(&wrong_width, Error::Node { node, error } if node == "up" && matches!(**error, Error::Candle(_)))
    );
    let text = wrong_width.to_string();
    assert!(text.starts_with("node \"up\": linear: f64[2, 2] does not fit a weight f64[4, 3]"), "{text}");
    assert_eq!(forward(&[2, 3]).to_string(), "node \"pair\": pipe: 2 values instead of the 1 declared");

    let mut g = Builder::new();
    let weight = g.parameter("tok.weight", Share::Replicate, |vb| Ok(vb.get(2, "wait")?));
    let y = g.func("same", same, [weight]);
    g.output("y", y);
    let pipe = g.finish(EqualCount(1)).unwrap();
    let vb = candle_nn::VarBuilder::zeros(DType::F32, &Device::Cpu);
    let error = pipe.build_stage(0, &vb, &Device::Cpu).err().map(|error| error.to_string());
    assert_eq!(error.as_deref(), Some("pipe: parameter \"tok.weight\" is built from \"tok.wait\""));
}

#[test]
fn gradients_that_do_not_fit() {
    let pipe = blocks(2).finish(EqualCount(2)).unwrap();
    let built = build(&pipe);
    let stage = &built.local.stages()[0];
    let x = Activation::constant(numbers("x", &[2, 4]).into());
    let tape = || stage.forward(vec![x.clone().unwrap()], &stage.ctx(0..2), Keep::Activations).unwrap().1;
    let error = tape().backward(&[]).unwrap_err().to_string();
    assert_eq!(error, format!("pipe: 0 gradients for the {} outputs of stage 0", stage.def().outputs.len()));
    let wrong = vec![Gradient(vec![Some(numbers("g", &[3, 4]))]); stage.def().outputs.len()];
    let error = tape().backward(&wrong).unwrap_err().to_string();
    assert!(error.starts_with("pipe: gradient (f64[3, 4]) for output 0 of stage 0, "), "{error}");
    let error = stage.evaluate(vec![], &stage.ctx(0..2)).unwrap_err().to_string();
    assert_eq!(error, "pipe: 0 values for stage 0, which takes 1");
    let none = tape().backward(&vec![Gradient::default(); stage.def().outputs.len()]).unwrap();
    assert!(none.inputs.iter().all(Gradient::is_none) && none.parameters.get_ids().next().is_none());
    assert_eq!(pipe.info().graph.nodes[0].kind, NodeKind::Module);
}

#[test]
fn dropout_probabilities_and_rows() {
    assert!(nn::Dropout::new(1.1, 0, "d").is_err() && nn::Dropout::new(f64::NAN, 0, "d").is_err());
    let stage = &build(&blocks(1).finish(EqualCount(1)).unwrap()).local.stages()[0].clone();
    let dropout = nn::Dropout::new(0.5, 0, "d").unwrap();
    let error = dropout.forward(&numbers("x", &[5]), &stage.ctx(0..2)).unwrap_err().to_string();
    assert_eq!(
        error,
        "pipe: random numbers of shape [5] for 2 rows: the first dim is not a multiple of the rows"
    );
}
