//! Random graphs with random cuts against their plain evaluation.
use crate::graph::common::{Args, Plain, Vb, build, numbers};
use crate::random_model::{Model, Places, Step, WIDTH, model};
use candle_core::Result;
use candle_nn::Module;
use proptest::prelude::*;
use std::collections::BTreeMap;

/// The model without a pipe.
fn plain(model: &Model, vb: &Vb, args: &Args) -> Result<Plain> {
    let mut values = vec![(args.args[0].tensor().unwrap().clone(), false)];
    for (i, step) in model.steps.iter().enumerate() {
        let mut at = |place: &usize| {
            let index = values.len() - 1 - place % values.len();
            values[index].1 = true;
            values[index].0.clone()
        };
        let made = match step {
            Step::Linear(a) => {
                vec![candle_nn::linear(WIDTH, WIDTH, vb.pp("nodes").pp(i))?.forward(&at(a))?.tanh()?]
            }
            Step::Sum(all) => {
                let first = at(&all[0]);
                vec![all[1..].iter().try_fold(first, |sum, x| sum + at(x))?]
            }
            Step::Gate(a, b) => vec![(at(a).tanh()? * at(b))?],
            Step::Pair(a) => vec![at(a).sin()?, (at(a) * 0.5)?],
            Step::Tree(a, b) => vec![(at(a) + at(b))?],
            Step::Shared(a, weight) => {
                vec![at(a).matmul(&vb.get((WIDTH, WIDTH), &format!("w{weight}"))?.t()?)?]
            }
        };
        values.extend(made.into_iter().map(|value| (value, false)));
    }
    let last = values.last().unwrap().0.clone();
    let mut loss = last.sqr()?.mean_all()?;
    for (value, is_used) in &values[1..] {
        if !is_used {
            loss = (loss + value.mean_all()?)?;
        }
    }
    Ok((BTreeMap::from([("y".into(), last)]), loss))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(150))]

    #[test]
    fn random_graphs_and_cuts(model in model()) {
        let pipe = model.declare().finish(Places(model.cuts.clone())).unwrap();
        let built = build(&pipe);
        let args = Args { args: vec![numbers("x", &[model.rows, WIDTH]).into()], ..Args::default() };
        built.check(&args, |vb, args| plain(&model, vb, args));
    }
}
