//! Random graphs, cut anywhere, by random schedules on random worlds, against the uncut model.
use crate::random_model::{Model, Places, WIDTH, model};
use crate::runtime::model::{Vb, builder, numbers};
use crate::runtime::parity::{close, schedules};
use candle_core::{DType, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::Schedule;
use candle_pipe::{EqualCount, Keep, Kwargs, LocalPipe, Pipe, Result, Runtime, StepOptions, Value};
use proptest::prelude::*;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use test_utils::{device, on_ranks};

/// The model cut into exactly so many stages, where the random cuts say as far as they do.
fn cut(model: &Model, stages: usize) -> Result<Pipe<Vb>> {
    let nodes = model.declare().graph().nodes.iter().filter(|node| !node.is_replicated()).count();
    let wanted = model.cuts.iter().copied().chain(0..nodes).filter(|&place| place + 1 < nodes);
    let mut places = BTreeSet::new();
    for place in wanted {
        if places.len() + 1 < stages {
            places.insert(place);
        }
    }
    model.declare().finish(Places(places))
}

fn batch(rows: usize, microbatches: usize) -> Result<Microbatches> {
    let x = Tensor::arange(0f64, (rows * WIDTH) as f64, &device())?.reshape((rows, WIDTH))?.sin()?;
    split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), microbatches, None, None)
}

/// Gives all weights numbers that processes agree on: candle draws others in each process.
fn settle(map: &VarMap) -> Result<()> {
    let vars: BTreeMap<String, Var> = map.data().lock().unwrap().clone().into_iter().collect();
    for (i, var) in vars.values().enumerate() {
        let places = Tensor::arange(0f64, var.elem_count() as f64, var.device())?;
        var.set(&((places + i as f64)?.sin()? * 0.4)?.reshape(var.shape())?.to_dtype(var.dtype())?)?;
    }
    Ok(())
}

/// Any schedule of up to 4 ranks, with its name.
fn any_schedule() -> impl Strategy<Value = (String, Schedule)> {
    let all: Vec<_> = (1..=4).flat_map(|ranks| schedules(ranks, &[1, 2, 3, 4, 6, 8])).collect();
    assert_eq!(all.len(), 419, "a new kind adds 24 schedules for each number of stages in KINDS");
    prop::sample::select(all)
}

/// Loss, output and gradients by name.
type Numbers = BTreeMap<String, Vec<f64>>;

proptest! {
    #![proptest_config(ProptestConfig { cases: 80, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_graphs_by_random_schedules(
        model in model(),
        (label, schedule) in any_schedule(),
        keeps_inputs: u8,
    ) {
        let (ranks, stages, microbatches) = (schedule.ranks().len(), schedule.stages(), schedule.microbatches());
        let pipe = cut(&model, stages);
        // Too few nodes for the stages, or one left without any.
        prop_assume!(pipe.as_ref().is_ok_and(|pipe| pipe.num_stages() == stages));
        let rows = microbatches - 1 + model.rows;

        let map = VarMap::new();
        let vb = VarBuilder::from_varmap(&map, DType::F64, &device());
        let whole = LocalPipe::new(&model.declare().finish(EqualCount(1)).unwrap(), &vb, &device()).unwrap();
        settle(&map).unwrap();
        let step = whole.forward_backward(&batch(rows, 1).unwrap(), &StepOptions::default()).unwrap();
        let mut expected = Numbers::new();
        expected.insert("loss".into(), numbers(step.loss().unwrap()).unwrap());
        expected.insert("y".into(), numbers(step.outputs[0].get("y").unwrap().tensor().unwrap()).unwrap());
        for (name, parameter) in whole.parameters() {
            // What no gradient reaches has none, or zeros where copies of it are summed.
            let zeros = parameter.zeros_like().unwrap();
            expected.insert(name.into(), numbers(step.grads.get(parameter).unwrap_or(&zeros)).unwrap());
        }
        let values: HashMap<String, Tensor> = map
            .data().lock().unwrap().iter()
            .map(|(name, var)| (name.clone(), var.as_detached_tensor().copy().unwrap()))
            .collect();

        let label = format!("{label}, {rows} rows, {model:?}");
        let found = on_ranks(ranks, &label, move |ctx| -> Result<Numbers> {
            let pipe = cut(&model, stages)?;
            let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &builder(&values, DType::F64)?, &device())?;
            let batch = batch(rows, microbatches)?;
            // One bit for each stage.
            let keeps_inputs = |stage: usize| keeps_inputs >> (stage % 8) & 1 == 1;
            let keep = |stage| if keeps_inputs(stage) { Keep::Inputs } else { Keep::Activations };
            let keep: Vec<Keep> = (0..stages).map(keep).collect();
            let made = runtime.forward_backward(&batch, &StepOptions::default().keep(keep))?.step;
            let mut found = Numbers::new();
            if let Ok(loss) = made.loss() {
                found.insert("loss".into(), numbers(loss)?);
            }
            let parts: Vec<Value> = made.outputs.iter().filter_map(|output| output.get("y").ok().cloned()).collect();
            if !parts.is_empty() {
                found.insert("y".into(), numbers(batch.merge(&parts, None)?.tensor()?)?);
            }
            for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
                let zeros = parameter.zeros_like()?;
                found.insert(name.clone(), numbers(made.grads.get(parameter).unwrap_or(&zeros))?);
            }
            Ok(found)
        });
        let names: BTreeSet<&String> = found.iter().flat_map(BTreeMap::keys).collect();
        prop_assert_eq!(names, expected.keys().collect::<BTreeSet<_>>());
        for (name, numbers) in found.iter().flatten() {
            close(numbers, &expected[name], 1e-12, &format!("{label}: {name}"));
        }
    }
}
