//! Where models are cut, what stages hold, and the listing.
use crate::graph::common::{Builder, Vb, build, same};
use crate::graph::models::{blocks, kinds_args, plain_blocks, skips, tied};
use candle_core::{DType, Device};
use candle_nn::{VarBuilder, VarMap};
use candle_pipe::graph::{Edge, Graph, NodeKind, StageInput, StageOutput, ValueId};
use candle_pipe::{EqualCount, In, Layer, PipeInfo, Share, SplitPoint, SplitSpec, nn};

#[test]
fn cuts_at_one_place_are_one() {
    let both = [
        ("blocks.0", SplitPoint::End),
        ("blocks.1", SplitPoint::Beginning),
        ("blocks.1.up", SplitPoint::Beginning),
    ];
    assert_eq!(blocks(2).finish(SplitSpec::at(both)).unwrap().num_stages(), 2);
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let a = g.func("a", same, [x]);
    g.split();
    g.split();
    let b = g.func("b", same, [a]);
    g.output("b", b);
    let spec = SplitSpec::at([("a", SplitPoint::End)]);
    assert_eq!(g.finish(spec).unwrap().num_stages(), 2);
}

#[test]
fn sequential_models_are_cut_between_all_layers() {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let layer =
        |name| -> Layer<'static, Vb> { (name, Box::new(|vb| Ok(Box::new(nn::linear(4, 4, vb.clone())?)))) };
    let y = g.sequential(["first", "second", "third"].map(layer), x);
    g.output("y", y);
    let pipe = g.finish(SplitSpec::declared()).unwrap();
    assert_eq!(pipe.num_stages(), 3);
    let parameters: Vec<String> = build(&pipe).local.parameters().into_keys().map(str::to_owned).collect();
    let want = ["first.bias", "first.weight", "second.bias", "second.weight", "third.bias", "third.weight"];
    assert_eq!(parameters, want);
}

#[test]
fn a_rank_builds_its_stage_alone() {
    let blocks =
        blocks(3).finish(SplitSpec::at(["blocks.1", "blocks.2"].map(|block| (block, SplitPoint::Beginning))));
    let pipe = blocks.unwrap();
    let parameters = VarMap::new();
    let vb = VarBuilder::from_varmap(&parameters, DType::F32, &Device::Cpu);
    let stage = pipe.build_stage(1, &vb, &Device::Cpu).unwrap();
    let mut built: Vec<String> = parameters.data().lock().unwrap().keys().cloned().collect();
    built.sort();
    assert_eq!(built, stage.parameters().keys().cloned().collect::<Vec<_>>());
    assert!(built.iter().all(|name| name.starts_with("blocks.1.")), "{built:?}");
    assert_eq!(pipe.stage(1).unwrap(), stage.def());
    let error = pipe.build_stage(3, &vb, &Device::Cpu).err().map(|error| error.to_string());
    assert_eq!(error.as_deref(), Some("pipe: no stage 3: the model has 3"));
}

#[test]
fn stages_know_what_they_take_and_give() {
    let pipe = skips()
        .finish(SplitSpec::at([("layers.1", SplitPoint::Beginning), ("gate", SplitPoint::Beginning)]))
        .unwrap();
    let id = |name: &str| {
        let graph = &pipe.info().graph;
        let made = graph.nodes.iter().flat_map(|node| &node.outputs).copied();
        let all = graph.inputs.iter().map(|input| input.value).chain(made);
        all.into_iter().find(|&value| graph.value_name(value) == name).unwrap()
    };
    let stage = pipe.stage(0).unwrap();
    assert_eq!(stage.inputs, [StageInput { value: id("x"), from: None }]);
    assert_eq!(stage.outputs, [StageOutput { value: id("layers.0"), consumers: vec![1, 2] }]);
    let last: Vec<(ValueId, Option<usize>)> =
        pipe.stage(2).unwrap().inputs.iter().map(|input| (input.value, input.from)).collect();
    let want = [
        (id("labels"), None),
        (id("mask"), None),
        (id("scale"), None),
        (id("layers.0"), Some(0)),
        (id("layers.1"), Some(1)),
        (id("heads[0]"), Some(1)),
        (id("heads[1]"), Some(1)),
    ];
    assert_eq!(last, want);
    let skip = Edge { value: id("layers.0"), from: 0, to: vec![1, 2] };
    assert_eq!(pipe.info().skip_edges().next(), Some(&skip));
    assert_eq!(pipe.info().loss_stage(), Some(2));
}

#[test]
fn listing() {
    let pipe = tied(Share::Replicate)
        .finish(SplitSpec::at([("shift", SplitPoint::Beginning), ("head", SplitPoint::Beginning)]));
    let want = "\
pipe(ids, targets): 3 stages of 7 nodes
stage 0
  ids <- the caller
  tok.weight() (replicated parameter)
  embed(tok.weight, ids) (function)
  layers.0(embed)
  layers.0 -> stage 1
stage 1
  layers.0 <- stage 0
  tok.weight() (replicated parameter)
  shift(layers.0, tok.weight) (function)
  layers.1(shift)
  layers.1 -> stage 2
stage 2
  targets <- the caller
  layers.1 <- stage 1
  tok.weight() (replicated parameter)
  head(layers.1, tok.weight) (function)
  loss(head, targets) (function)
output logits = head
loss = loss (mean over rows)
";
    assert_eq!(pipe.unwrap().to_string(), want);
}

#[test]
fn info_survives_json() {
    let pipe = skips().finish(EqualCount(4)).unwrap();
    let json = serde_json::to_string(pipe.info()).unwrap();
    let info: PipeInfo = serde_json::from_str(&json).unwrap();
    assert_eq!(&info, pipe.info());
    // The graph alone can be cut again.
    assert_eq!(PipeInfo::new(info.graph, &[3]).unwrap().num_stages(), 2);
}

#[test]
fn graphs_by_hand_are_checked() {
    let mut graph: Graph = blocks(1).graph().clone();
    assert_eq!(graph.dead_values(), []);
    graph.nodes.swap(0, 1);
    let error = graph.check().unwrap_err().to_string();
    assert_eq!(
        error,
        "pipe: node \"blocks.0.act\" uses a value of node \"blocks.0.up\", which comes after it; move it behind that node"
    );
    let mut graph: Graph = blocks(1).graph().clone();
    let late = graph.nodes[2].outputs[0];
    graph.nodes[0].inputs.push(late);
    let error = graph.check().unwrap_err().to_string();
    assert!(error.starts_with("pipe: nodes in a cycle: "), "{error}");
    for node in ["blocks.0.up", "blocks.0.act", "blocks.0.down"] {
        assert!(error.contains(node), "{error}");
    }
    let mut graph: Graph = blocks(1).graph().clone();
    graph.nodes[1].inputs = vec![ValueId(99)];
    assert_eq!(
        graph.check().unwrap_err().to_string(),
        "pipe: node \"blocks.0.act\" uses value %99, which nothing makes"
    );
    let mut graph: Graph = blocks(1).graph().clone();
    graph.nodes[1].outputs = graph.nodes[0].outputs.clone();
    assert_eq!(graph.check().unwrap_err().to_string(), "pipe: value blocks.0.up is made twice");
    let mut graph: Graph = blocks(1).graph().clone();
    graph.nodes[1].kind = NodeKind::Parameter(Share::Transmit);
    let error = graph.check().unwrap_err().to_string();
    assert_eq!(error, "pipe: parameter \"blocks.0.act\" takes nothing and makes one value");
    let graph: Graph = blocks(1).graph().clone();
    assert_eq!(graph.stages(&[3, 2]).unwrap_err().to_string(), "pipe: cuts [3, 2] do not ascend");
    assert_eq!(
        graph.stages(&[9]).unwrap_err().to_string(),
        "pipe: stage 1 would be empty: 2 stages of 5 nodes"
    );
}

#[test]
fn scopes_name_nodes_and_parameters() {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let y = g.scope("encoder", |g| {
        g.scope("layers", |g| g.module("0", |vb| Ok(nn::linear_no_bias(4, 4, vb.clone())?), [x]))
    });
    let weight =
        g.scope("head", |g| g.parameter("weight", Share::Transmit, |vb| Ok(vb.get((2, 4), "weight")?)));
    let y = g.func(
        "head",
        |xs, _| Ok(nn::deferred_linear(xs[0].tensor()?, xs[1].tensor()?, None)?.into()),
        [y, weight],
    );
    g.output("y", y);
    let built = build(&g.finish(EqualCount(1)).unwrap());
    let names: Vec<&str> = built.local.parameters().into_keys().collect();
    assert_eq!(names, ["encoder.layers.0.weight", "head.weight"]);
    let vars = built.local.named_vars().unwrap();
    assert_eq!(vars.iter().map(|(name, _)| name.as_str()).collect::<Vec<_>>(), names);
}

#[test]
fn blocks_one_by_one() {
    build(&blocks(1).finish(SplitSpec::declared()).unwrap()).check(&kinds_args(1), plain_blocks(1));
}
