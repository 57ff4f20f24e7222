//! One stage's tape: the two parts of a backward pass, what is kept, and what is freed.
use crate::graph::common::{Builder, assert_close, build, numbers};
use crate::graph::models::{blocks, kinds_args, skips, skips_args, tied, tied_args};
use candle_core::{CpuStorage, CustomOp1, DType, Device, Layout, Shape, Tensor};
use candle_nn::{VarBuilder, VarMap};
use candle_pipe::graph::ValueId;
use candle_pipe::{
    Activation, EqualCount, Gradient, In, Keep, LocalPipe, LossReduction, Share, SplitPoint, SplitSpec,
    StageModule, StepOptions, nn,
};
use std::collections::BTreeMap;
use std::sync::Arc;

#[test]
fn both_parts_are_the_whole_bit_by_bit() {
    for stages in [1, 2, 4] {
        let built = build(&skips().finish(EqualCount(stages)).unwrap());
        for chunks in 1..=4 {
            let whole = built.step(&skips_args(7), chunks, &StepOptions::default());
            let parts = StepOptions::default().split_backward(true);
            let parts = built.step(&skips_args(7), chunks, &parts);
            assert_eq!(built.bits(&whole), built.bits(&parts));
        }
        for share in [Share::Replicate, Share::Transmit] {
            let built = build(&tied(share).finish(EqualCount(stages)).unwrap());
            let whole = built.step(&tied_args(5), 3, &StepOptions::default());
            let keep = Keep::Inputs;
            let parts = built.step(&tied_args(5), 3, &StepOptions::default().split_backward(true).keep(keep));
            assert_eq!(built.bits(&whole), built.bits(&parts));
        }
    }
}

#[test]
fn weights_wait_and_the_rest_does_not() {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let h = g.module("ours", |vb| Ok(nn::linear(4, 4, vb.clone())?), [x]);
    let h = g.module("candles", |vb| Ok(candle_nn::linear(4, 4, vb.clone())?), [h]);
    g.output("y", h);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.sum_all()?), [h], LossReduction::Sum);
    let built = build(&g.finish(SplitSpec::declared()).unwrap());
    let stage = &built.local.stages()[0];
    let input = Activation { value: numbers("x", &[3, 4]).into(), tracked: vec![true] };
    let run = || stage.forward(vec![input.clone()], &stage.ctx(0..3), Keep::Activations).unwrap();
    let (outputs, tape) = run();
    let mut seeds = vec![Gradient::default(); outputs.len()];
    let loss = stage.loss_output().unwrap();
    seeds[loss] = Gradient::of_loss(&outputs[loss].value, 1.0).unwrap();
    let whole = tape.backward(&seeds).unwrap();
    let (first, late) = run().1.backward_inputs(&seeds).unwrap();
    let late = late.backward().unwrap();
    let named = |name: &str| &stage.parameters()[name];
    for (name, waits) in
        [("ours.weight", true), ("ours.bias", false), ("candles.weight", false), ("candles.bias", false)]
    {
        let (early, late) = (first.parameters.get(named(name)), late.get(named(name)));
        assert_eq!((early.is_some(), late.is_some()), (!waits, waits), "{name}");
        let got = early.or(late).unwrap().to_vec1_or_2();
        assert_eq!(got, whole.parameters.get(named(name)).unwrap().to_vec1_or_2(), "{name}");
    }
    let gradient = |gradients: &[Gradient]| gradients[0].0[0].as_ref().unwrap().to_vec1_or_2();
    assert_eq!(gradient(&first.inputs), gradient(&whole.inputs));
}

trait Elements {
    fn to_vec1_or_2(&self) -> Vec<f64>;
}

impl Elements for Tensor {
    fn to_vec1_or_2(&self) -> Vec<f64> {
        self.flatten_all().unwrap().to_vec1().unwrap()
    }
}

#[test]
fn a_weight_of_another_stage_never_waits() {
    // The head's stage gets the weight as a value: whoever owns it waits for its gradient.
    let pipe = tied(Share::Transmit).finish(SplitSpec::at([("head", SplitPoint::Beginning)])).unwrap();
    let built = build(&pipe);
    let options = StepOptions::default().split_backward(true);
    let step = built.step(&tied_args(4), 2, &options);
    let weight = built.local.parameters()["tok.weight"];
    assert!(step.grads.get(weight).is_some());
    let names: Vec<&str> = built.local.stages()[1].parameters().keys().map(String::as_str).collect();
    assert_eq!(names, [""; 0], "the head's stage holds no parameter");
}

#[test]
fn replicated_parameters_of_one_process_are_one_variable() {
    let pipe = tied(Share::Replicate).finish(SplitSpec::at([("head", SplitPoint::Beginning)])).unwrap();
    let built = build(&pipe);
    let [first, last] = built.local.stages() else { panic!() };
    assert_eq!(first.parameters()["tok.weight"].id(), last.parameters()["tok.weight"].id());
}

/// Every stage with variables of its own, as on a rank of its own: the gradients of the members of a share add up to
/// that of the uncut model's parameter.
#[test]
fn stages_built_apart() {
    let pipe = tied(Share::Replicate).finish(EqualCount(3)).unwrap();
    let whole = build(&pipe);
    let args = tied_args(4);
    let want = whole.step(&args, 1, &StepOptions::default());
    let stages: Vec<StageModule> = (0..3)
        .map(|index| {
            let parameters = VarMap::new();
            let vb = VarBuilder::from_varmap(&parameters, DType::F64, &Device::Cpu);
            let stage = pipe.build_stage(index, &vb, &Device::Cpu).unwrap();
            for (name, var) in parameters.data().lock().unwrap().iter() {
                var.set(&numbers(name, var.dims())).unwrap();
            }
            stage
        })
        .collect();
    let mut values: BTreeMap<ValueId, Activation> = pipe
        .bind(&args.args, &args.kwargs)
        .unwrap()
        .into_iter()
        .map(|(value, input)| (value, Activation::constant(input).unwrap()))
        .collect();
    let mut tapes = Vec::new();
    for stage in &stages {
        let inputs = stage.def().inputs.iter().map(|input| values[&input.value].clone()).collect();
        let (outputs, tape) = stage.forward(inputs, &stage.ctx(0..4), Keep::Activations).unwrap();
        values.extend(stage.def().outputs.iter().map(|output| output.value).zip(outputs));
        tapes.push(tape);
    }
    let loss = pipe.info().graph.loss.unwrap().value;
    let mut found = BTreeMap::from([(loss, vec![Gradient::of_loss(&values[&loss].value, 1.0).unwrap()])]);
    let mut sums: BTreeMap<&str, Tensor> = BTreeMap::new();
    for (stage, tape) in stages.iter().zip(tapes).rev() {
        let of = |value: &ValueId| Gradient::sum(found.get(value).into_iter().flatten()).unwrap();
        let seeds: Vec<Gradient> = stage.def().outputs.iter().map(|output| of(&output.value)).collect();
        let backward = tape.backward(&seeds).unwrap();
        for (input, gradient) in stage.def().inputs.iter().zip(backward.inputs) {
            found.entry(input.value).or_default().push(gradient);
        }
        for (name, parameter) in stage.parameters() {
            let grad = backward.parameters.get(parameter).unwrap();
            let sum = sums.get(name.as_str()).map_or_else(|| grad.clone(), |sum| (sum + grad).unwrap());
            sums.insert(name, sum);
        }
    }
    let parameters = whole.local.parameters();
    assert_eq!(sums.keys().collect::<Vec<_>>(), parameters.keys().collect::<Vec<_>>());
    for (name, sum) in sums {
        assert_close(name, &sum, want.grads.get(parameters[name]).unwrap());
    }
}

/// An op that shares a token with whoever counts how many graphs it is in.
struct Counted(#[expect(dead_code, reason = "held for its count")] Arc<()>);

impl CustomOp1 for Counted {
    fn name(&self) -> &'static str {
        "counted"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let (start, end) = layout.contiguous_offsets().unwrap();
        let CpuStorage::F64(data) = storage else { candle_core::bail!("counted: expected f64") };
        Ok((CpuStorage::F64(data[start..end].to_vec()), layout.shape().clone()))
    }

    fn bwd(&self, _: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(grad.clone()))
    }
}

/// Three stages, each with an op that is counted.
fn counted(token: &Arc<()>) -> Builder {
    let mut g = Builder::new();
    let mut h = g.input("x", In::Arg);
    for i in 0..3 {
        let layer = g.module(&format!("layers.{i}"), |vb| Ok(nn::linear(4, 4, vb.clone())?), [h]);
        let token = Arc::downgrade(token);
        let count = move |xs: &[candle_pipe::Value], _: &candle_pipe::Ctx| {
            Ok(xs[0].tensor()?.apply_op1(Counted(token.upgrade().unwrap()))?.into())
        };
        h = g.func(&format!("count.{i}"), count, [layer]);
    }
    g.output("y", h);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [h], LossReduction::Mean);
    g
}

#[test]
fn no_graph_outlives_its_step() {
    let token = Arc::new(());
    let built = build(&counted(&token).finish(EqualCount(3)).unwrap());
    let batch = kinds_args(5).split(3);
    for keep in [Keep::Activations, Keep::Inputs] {
        for split_backward in [false, true] {
            let options = StepOptions::default().keep(keep).split_backward(split_backward);
            let step = built.local.forward_backward(&batch, &options).unwrap();
            assert_eq!(Arc::strong_count(&token), 1, "{options:?}");
            assert!(step.grads.get_ids().count() >= 6);
        }
    }
    let evaluated = built.local.evaluate(&batch, &StepOptions::default()).unwrap();
    assert_eq!((Arc::strong_count(&token), evaluated.losses.len()), (1, 3));
}

#[test]
fn stages_keep_what_they_are_told_to() {
    let token = Arc::new(());
    let built = build(&counted(&token).finish(SplitSpec::declared()).unwrap());
    let stage = &built.local.stages()[0];
    let input = Activation { value: numbers("x", &[2, 4]).into(), tracked: vec![true] };
    for (keep, graphs) in [(Keep::Activations, 3), (Keep::Inputs, 0)] {
        let (outputs, tape) = stage.forward(vec![input.clone()], &stage.ctx(0..2), keep).unwrap();
        assert_eq!(Arc::strong_count(&token), 1 + graphs, "{keep:?}");
        let mut seeds = vec![Gradient::default(); outputs.len()];
        let loss = stage.loss_output().unwrap();
        seeds[loss] = Gradient::of_loss(&outputs[loss].value, 1.0).unwrap();
        let (backward, late) = tape.backward_inputs(&seeds).unwrap();
        assert_eq!(Arc::strong_count(&token), 1, "what waits for the weights holds no graph");
        assert!(!backward.inputs[0].is_none());
        assert_eq!(late.backward().unwrap().get_ids().count(), 3);
    }
}

#[test]
fn empty_inputs_give_zeros() {
    let weight = candle_core::Var::from_tensor(&numbers("w", &[3, 4])).unwrap();
    let x = candle_core::Var::from_tensor(&numbers("x", &[0, 4])).unwrap();
    let y = nn::deferred_linear(&x, &weight, None).unwrap();
    assert_eq!(y.dims(), [0, 3]);
    let grads = y.sum_all().unwrap().backward().unwrap();
    assert_eq!(grads.get(&weight).unwrap().to_vec1_or_2(), [0.0; 12]);
    assert_eq!(grads.get(&x).unwrap().dims(), [0, 4]);
}

#[test]
fn frozen_parameters_have_no_gradients() {
    let pipe = blocks(2).finish(EqualCount(3)).unwrap();
    let local = LocalPipe::new(&pipe, &VarBuilder::zeros(DType::F64, &Device::Cpu), &Device::Cpu).unwrap();
    let step = local.forward_backward(&kinds_args(4).split(2), &StepOptions::default()).unwrap();
    assert_eq!((step.grads.get_ids().count(), local.parameters().len()), (0, 8));
    assert!(local.named_vars().unwrap().is_empty());
    assert!(step.loss().unwrap().to_scalar::<f64>().unwrap() > 0.0);
}

#[test]
fn a_second_pass_that_draws_anew_is_refused() {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let h = g.module("layer", |vb| Ok(nn::linear(4, 16, vb.clone())?), [x]);
    let h = g.module("drop", |_| Ok(candle_nn::Dropout::new(0.5)), [h]);
    let h = g.func("sum", |xs, _| Ok(xs[0].tensor()?.sum_keepdim(1)?.into()), [h]);
    g.output("y", h);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [h], LossReduction::Mean);
    let built = build(&g.finish(SplitSpec::at([("sum", SplitPoint::Beginning)])).unwrap());
    let batch = kinds_args(6).split(2);
    let step = |keep| built.local.forward_backward(&batch, &StepOptions::default().keep(keep));
    let said = step(Keep::Inputs).unwrap_err().to_string();
    for want in ["stage 0: ", "microbatch 0", "node \"drop\" (f64[3, 16])", "Keep::Activations"] {
        assert!(said.contains(want), "{said}");
    }
    assert!(step(Keep::Activations).is_ok() && step(Keep::InputsUnchecked).is_ok());
    // Where nothing is dropped, the second pass is the first.
    let options = StepOptions::default().keep(Keep::Inputs).training(false);
    assert!(built.local.forward_backward(&batch, &options).is_ok());
}
