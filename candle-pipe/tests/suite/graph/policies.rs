//! Every rule that cuts a model.
use crate::graph::common::{Builder, Vb, build, same};
use crate::graph::models::{blocks, kinds_args, plain_blocks};
use candle_core::DType;
use candle_pipe::graph::Graph;
use candle_pipe::{
    BalancedCost, EqualCount, EqualParams, In, Result, Share, SizeThreshold, SplitPolicy, SplitSpec,
    StageLayout, nn, shapes_only,
};

/// A model of layers with so many parameters each, on which a shared one of 100 elements follows or not.
fn layers(sizes: &[usize], shared: &[usize]) -> Builder {
    let mut g = Builder::new();
    let mut h = g.input("x", In::Arg);
    let weight = g.parameter("tied.weight", Share::Replicate, |vb| Ok(vb.get(100, "weight")?));
    for (i, &size) in sizes.iter().enumerate() {
        let inputs = if shared.contains(&i) { vec![h, weight] } else { vec![h] };
        let build = move |vb: &Vb| {
            vb.get(size, "weight")?;
            Ok(candle_pipe::stage_op(|xs, _| Ok(vec![xs[0].clone()])))
        };
        h = g.module(&format!("layers.{i}"), build, inputs);
    }
    g.output("y", h);
    g.measure(&shapes_only(DType::F32)).unwrap();
    g
}

/// The layers that stages begin with, but for the first.
fn begins(g: &Builder, policy: &dyn SplitPolicy) -> Vec<usize> {
    let cuts = policy.cuts(g.graph()).unwrap();
    cuts.iter()
        .map(|&cut| g.graph().nodes[cut].name.strip_prefix("layers.").unwrap().parse().unwrap())
        .collect()
}

/// The least that the largest run of `sizes` in `stages` runs can be, by trying every cut.
fn least(sizes: &[usize], stages: usize) -> usize {
    if stages == 1 {
        return sizes.iter().sum();
    }
    (1..=sizes.len() + 1 - stages)
        .map(|end| least(&sizes[end..], stages - 1).max(sizes[..end].iter().sum()))
        .min()
        .unwrap()
}

#[test]
fn equal_counts_and_parameters() {
    let g = layers(&[1; 7], &[]);
    assert_eq!(begins(&g, &EqualCount(1)), [0; 0]);
    assert_eq!(begins(&g, &EqualCount(7)), [1, 2, 3, 4, 5, 6]);
    assert_eq!(begins(&g, &EqualCount(3)), [3, 5]);
    for nodes in 1..=16 {
        let g = layers(&vec![1; nodes], &[0]);
        for stages in 1..=nodes {
            let ends = [&[0][..], &begins(&g, &EqualCount(stages)), &[nodes]].concat();
            let sizes = ends.windows(2).map(|run| run[1] - run[0]);
            assert!(
                sizes.clone().max().unwrap() <= sizes.min().unwrap() + 1,
                "{nodes} in {stages}: {ends:?}"
            );
        }
    }
    for sizes in [&[5, 1, 1, 1, 5, 9, 1][..], &[1, 2, 3, 4, 5, 6, 7, 8], &[9, 9], &[0, 0, 0, 1]] {
        for stages in 1..=sizes.len() {
            let begins = begins(&layers(sizes, &[]), &EqualParams(stages));
            let ends = [&[0][..], &begins, &[sizes.len()]].concat();
            let largest =
                ends.windows(2).map(|run| sizes[run[0]..run[1]].iter().sum::<usize>()).max().unwrap();
            assert_eq!((begins.len(), largest), (stages - 1, least(sizes, stages)), "{sizes:?} in {stages}");
        }
    }
    // A replicated parameter counts in each stage that uses it, so its users are best together.
    assert_eq!(begins(&layers(&[60, 10, 10, 60], &[0, 1]), &EqualParams(2)), [2]);
    assert_eq!(begins(&layers(&[60, 10, 10, 60], &[0, 3]), &EqualParams(2)), [2]);
    assert_eq!(begins(&layers(&[60, 10, 10, 60], &[2, 3]), &EqualParams(2)), [2]);
    assert_eq!(begins(&layers(&[10, 10, 10, 130], &[0, 1]), &EqualParams(2)), [3]);
}

#[test]
fn size_thresholds() {
    assert_eq!(begins(&layers(&[3, 3, 3, 3], &[]), &SizeThreshold(6)), [2]);
    assert_eq!(begins(&layers(&[3, 9, 3, 3], &[]), &SizeThreshold(6)), [1, 2]);
    assert_eq!(begins(&layers(&[3, 9, 3, 3], &[]), &SizeThreshold(100)), [0; 0]);
    // The shared parameter counts once in a stage.
    assert_eq!(begins(&layers(&[3, 3, 3, 3], &[0, 1, 3]), &SizeThreshold(106)), [2]);
}

#[test]
fn balanced_by_cost() {
    let g = layers(&[1; 5], &[]);
    let costs =
        |costs: [f64; 5]| costs.into_iter().enumerate().map(|(i, cost)| (format!("layers.{i}"), cost));
    assert_eq!(begins(&g, &BalancedCost::new(2, costs([1., 1., 1., 1., 4.]))), [4]);
    assert_eq!(begins(&g, &BalancedCost::new(3, costs([4., 1., 1., 1., 1.]))), [1, 3]);
    let faults = [
        (
            BalancedCost::new(2, [("layer.1", 1.0)]),
            "a cost for node \"layer.1\", which is not there (did you mean \"layers.1\"?)",
        ),
        (
            BalancedCost::new(2, [("layers.1", -1.0)]),
            "node \"layers.1\" costs -1: expected a finite number of at least 0",
        ),
        (
            BalancedCost::new(2, [("layers.1", f64::NAN)]),
            "node \"layers.1\" costs NaN: expected a finite number of at least 0",
        ),
        (
            BalancedCost::new(6, [("layers.1", 1.0)]),
            "6 stages of 5 nodes: expected at least 1 stage, and at most one per node",
        ),
        (
            BalancedCost::new(0, [("layers.1", 1.0)]),
            "0 stages of 5 nodes: expected at least 1 stage, and at most one per node",
        ),
    ];
    for (policy, want) in faults {
        assert_eq!(policy.cuts(g.graph()).unwrap_err().to_string(), format!("pipe: {want}"));
    }
}

#[test]
fn layouts() {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let mut h = g.module("embed", |vb| Ok(nn::linear(4, 4, vb.clone())?), [x]);
    h = g.func("scale", same, [h]); // belongs to the embedding
    for i in 0..6 {
        h = g.scope(&format!("layers.{i}"), |g| {
            let a = g.module("a", |vb| Ok(nn::linear(4, 4, vb.clone())?), [h]);
            g.func("b", same, [a])
        });
    }
    h = g.module("head", |vb| Ok(nn::linear(4, 4, vb.clone())?), [h]);
    g.output("y", h);
    let names = |layout: &str| -> Result<Vec<String>> {
        let cuts = layout.parse::<StageLayout>()?.cuts(g.graph())?;
        Ok(cuts.iter().map(|&cut| g.graph().nodes[cut].name.clone()).collect())
    };
    assert_eq!(names("E|tt|(t)*4|L").unwrap(), ["layers.0.a", "layers.2.a", "head"]);
    assert_eq!(names("Et*2, (tt|)*2 |L").unwrap(), ["layers.4.a", "head"]);
    assert_eq!(names("(t)*8").unwrap(), [""; 0]);
    let faults = [
        ("E|t|L", "the layout E|t|L has 3 letters, the model 8 layers: embed, layers.0, layers.1"),
        ("E|(t", "a `(` that nothing closes"),
        ("E|t)", "a `)` that nothing opens"),
        ("|E", "stage 0 is empty"),
        ("E|", "stage 1 is empty"),
        ("t*", "a `*` without a number"),
        ("t*0", "a `*` without a number"),
        ("1t", "`1` is not a letter"),
        ("((t*999)*999)*999", "more than 4096 letters"),
        (&"(".repeat(9999), "longer than 4096 bytes"),
        (&"(".repeat(4096), "more than 64 brackets are open"),
        (&format!("{}t{}", "(".repeat(65), ")".repeat(65)), "more than 64 brackets are open"),
        (&"(".repeat(64), "a `(` that nothing closes"),
    ];
    for (layout, want) in faults {
        let error = names(layout).unwrap_err().to_string();
        assert!(error.contains(want), "{layout}: {error}");
    }
}

#[test]
fn unmeasured_models_are_refused() {
    let error = blocks(2).finish(EqualParams(2)).unwrap_err().to_string();
    assert_eq!(error, "pipe: the size of node \"blocks.0.up\" is not known; measure the model first");
}

#[test]
fn every_policy_gives_the_uncut_models_numbers() {
    struct Last;
    impl SplitPolicy for Last {
        fn cuts(&self, graph: &Graph) -> Result<Vec<usize>> {
            Ok(vec![graph.nodes.len() - 1])
        }
    }
    let costs = [("blocks.0.up", 3.0), ("blocks.1.down", 1.0), ("blocks.2.up", 1.0)];
    let policies: [SplitSpec; 6] = [
        EqualCount(4).into(),
        EqualParams(3).into(),
        SizeThreshold(41).into(),
        BalancedCost::new(2, costs).into(),
        "b|b|b".parse::<StageLayout>().unwrap().into(),
        Last.into(),
    ];
    for (policy, stages) in policies.into_iter().zip([4, 3, 3, 2, 3, 2]) {
        let mut g = blocks(3);
        g.measure(&shapes_only(DType::F64)).unwrap();
        let pipe = g.finish(policy).unwrap();
        assert_eq!(pipe.num_stages(), stages, "{pipe}");
        build(&pipe).check(&kinds_args(4), plain_blocks(3));
    }
}
