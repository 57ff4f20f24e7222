//! Random graphs with random cuts, for the tests of what runs them.
use candle_core::Tensor;
use candle_nn::{Module, VarBuilder};
use candle_pipe::graph::{Graph, ValueId};
use candle_pipe::{Ctx, In, LossReduction, PipeBuilder, Share, SplitPolicy, Value, nn, stage_op};
use proptest::prelude::*;
use std::collections::BTreeSet;

type Vb = VarBuilder<'static>;
type Builder = PipeBuilder<Vb>;

/// The width of all tensors, and of the input `x`.
pub(crate) const WIDTH: usize = 3;

/// A node, whose arguments are values before it, counted from the last.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    Linear(usize),
    Sum(Vec<usize>),
    Gate(usize, usize),
    Pair(usize),
    Tree(usize, usize),
    Shared(usize, usize),
}

#[derive(Debug, Clone)]
pub(crate) struct Model {
    pub(crate) steps: Vec<Step>,
    shares: [Share; 2],
    pub(crate) cuts: BTreeSet<usize>,
    pub(crate) rows: usize,
}

pub(crate) fn model() -> impl Strategy<Value = Model> {
    let place = 0..20usize;
    let step = prop_oneof![
        place.clone().prop_map(Step::Linear),
        prop::collection::vec(place.clone(), 1..4).prop_map(Step::Sum),
        (place.clone(), place.clone()).prop_map(|(a, b)| Step::Gate(a, b)),
        place.clone().prop_map(Step::Pair),
        (place.clone(), place.clone()).prop_map(|(a, b)| Step::Tree(a, b)),
        (place, 0..2usize).prop_map(|(a, weight)| Step::Shared(a, weight)),
    ];
    let share = || prop_oneof![Just(Share::Transmit), Just(Share::Replicate)];
    let steps = prop::collection::vec(step, 2..12);
    (steps, [share(), share()], prop::collection::btree_set(0..14usize, 0..8), 1..7usize)
        .prop_map(|(steps, shares, cuts, rows)| Model { steps, shares, cuts, rows })
}

/// The first tensor of a value, with the others added.
fn flat(value: &Value) -> candle_pipe::Result<Tensor> {
    match value {
        Value::Tuple(parts) => Ok((flat(&parts[0])? + flat(&parts[1])?)?),
        value => Ok(value.tensor()?.clone()),
    }
}

impl Model {
    pub(crate) fn declare(&self) -> Builder {
        let mut g = Builder::new();
        let mut values = vec![g.input("x", In::Arg)];
        let mut weights: [Option<ValueId>; 2] = [None, None];
        for (i, step) in self.steps.iter().enumerate() {
            let name = format!("nodes.{i}");
            let at = |place: &usize| values[values.len() - 1 - place % values.len()];
            let made = match step {
                Step::Linear(a) => {
                    let build = |vb: &Vb| {
                        let layer = nn::linear(WIDTH, WIDTH, vb.clone())?;
                        Ok(stage_op(move |xs, _| Ok(vec![layer.forward(&flat(&xs[0])?)?.tanh()?.into()])))
                    };
                    vec![g.module(&name, build, [at(a)])]
                }
                Step::Sum(all) => {
                    let sum = |xs: &[Value], _: &Ctx| {
                        let rest =
                            xs[1..].iter().try_fold(flat(&xs[0])?, |sum, x| -> candle_pipe::Result<Tensor> {
                                Ok((sum + flat(x)?)?)
                            });
                        Ok(rest?.into())
                    };
                    vec![g.func(&name, sum, all.iter().map(at))]
                }
                Step::Gate(a, b) => {
                    let gate = |xs: &[Value], _: &Ctx| Ok((flat(&xs[0])?.tanh()? * flat(&xs[1])?)?.into());
                    vec![g.func(&name, gate, [at(a), at(b)])]
                }
                Step::Pair(a) => {
                    let pair = |xs: &[Value], _: &Ctx| {
                        Ok([flat(&xs[0])?.sin()?.into(), (flat(&xs[0])? * 0.5)?.into()])
                    };
                    g.func_many::<2>(&name, pair, [at(a)]).to_vec()
                }
                Step::Tree(a, b) => {
                    let tree = |xs: &[Value], _: &Ctx| Ok((flat(&xs[0])?, flat(&xs[1])?, "kept", 5).into());
                    vec![g.func(&name, tree, [at(a), at(b)])]
                }
                Step::Shared(a, weight) => {
                    let (at, which) = (at(a), *weight);
                    let build = move |vb: &Vb| Ok(vb.get((WIDTH, WIDTH), &format!("w{which}"))?);
                    let declared = weights[which];
                    let weight = declared
                        .unwrap_or_else(|| g.parameter(&format!("w{which}"), self.shares[which], build));
                    weights[which] = Some(weight);
                    let product = |xs: &[Value], _: &Ctx| {
                        Ok(nn::deferred_linear(&flat(&xs[0])?, xs[1].tensor()?, None)?.into())
                    };
                    vec![g.func(&name, product, [at, weight])]
                }
            };
            values.extend(made);
        }
        // What nothing else uses goes into the loss together with the last value.
        let open = g.graph().dead_values();
        let loss = g.loss_fn(
            |xs, _| {
                let mut loss = flat(&xs[0])?.sqr()?.mean_all()?;
                for x in &xs[1..] {
                    loss = (loss + flat(x)?.mean_all()?)?;
                }
                Ok(loss)
            },
            values.last().copied().into_iter().chain(open),
            LossReduction::Mean,
        );
        let last = *values.last().unwrap();
        let result = g.func("result", |xs, _| Ok(flat(&xs[0])?.into()), [last]);
        g.output("y", result);
        let _ = loss;
        g
    }
}

/// Cuts before the nodes with these places, where there are such.
pub(crate) struct Places(pub(crate) BTreeSet<usize>);

impl SplitPolicy for Places {
    fn cuts(&self, graph: &Graph) -> candle_pipe::Result<Vec<usize>> {
        let placed: Vec<usize> =
            (0..graph.nodes.len()).filter(|&node| !graph.nodes[node].is_replicated()).collect();
        Ok(self.0.iter().filter_map(|&place| placed.get(place + 1).copied()).collect())
    }
}
