//! Tensors are handed over from rank to rank, not copied; parameters never are handed over.
use crate::runtime::model::{Vb, builder};
use candle_core::{DType, Tensor};
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    In, Kwargs, LocalPipe, LossReduction, PipeBuilder, Result, Runtime, Share, SplitSpec, StepOptions, Value,
};
use std::collections::{BTreeMap, HashMap};
use std::sync::{Arc, Mutex};
use test_utils::{device, on_ranks, skip, skip_among_processes};

/// Where things lay, by what they are, the pass and the microbatch.
type Places = Arc<Mutex<BTreeMap<String, usize>>>;

fn address(tensor: &Tensor) -> usize {
    std::ptr::from_ref(&*tensor.storage_and_layout().0).addr()
}

#[test]
fn what_wants_no_gradient_arrives_where_it_was_made() {
    if skip_among_processes("it compares addresses of two ranks") {
        return;
    }
    let places = Places::default();
    let seen = places.clone();
    let on_host = on_ranks(2, "handover", move |ctx| -> Result<bool> {
        let note = |places: &Places, what: &str, training: bool, microbatch: usize, tensor: &Tensor| {
            places.lock().unwrap().insert(format!("{what} {training} {microbatch}"), address(tensor));
        };
        let mut g = PipeBuilder::<Vb>::new();
        let x = g.input("x", In::Arg);
        let weight = g.parameter("weight", Share::Transmit, |vb| Ok(vb.get((2, 2), "weight")?));
        let log = seen.clone();
        let make = move |xs: &[Value], ctx: &candle_pipe::Ctx| {
            let (x, weight) = (xs[0].tensor()?, xs[1].tensor()?);
            let (plain, learned) = ((x * 2.0)?, x.matmul(weight)?);
            // A view lies where the whole does.
            let part = (x * 3.0)?.narrow(0, 0, 1)?;
            for (what, tensor) in [
                ("plain made", &plain),
                ("learned made", &learned),
                ("part made", &part),
                ("weight made", weight),
            ] {
                note(&log, what, ctx.training, ctx.microbatch, tensor);
            }
            Ok([plain.into(), learned.into(), part.into(), weight.narrow(0, 0, 1)?.into()])
        };
        let made: [_; 4] = g.func_many("make", make, [x, weight]);
        g.split();
        let log = seen.clone();
        let take = move |xs: &[Value], ctx: &candle_pipe::Ctx| {
            let tensors = xs.iter().map(Value::tensor).collect::<Result<Vec<_>>>()?;
            for (what, tensor) in ["plain taken", "learned taken", "part taken", "row taken", "weight taken"]
                .iter()
                .zip(&tensors)
            {
                note(&log, what, ctx.training, ctx.microbatch, tensor);
            }
            let sum = ((tensors[0] + tensors[1])?
                .broadcast_add(tensors[2])?
                .broadcast_add(tensors[3])?
                .matmul(tensors[4]))?;
            Ok(sum.into())
        };
        let sum = g.func("take", take, made.into_iter().chain([weight]));
        g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.mean_all()?), [sum], LossReduction::Mean);
        let pipe = g.finish(SplitSpec::declared())?;
        let values = [("weight".to_string(), Tensor::ones((2, 2), DType::F64, &device())?)];
        let schedule = ScheduleKind::OneFOneB.schedule(2, 3, 1)?;
        let vb = builder(&values.into(), DType::F64)?;
        let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &vb, &device())?;
        let x = Tensor::ones((6, 2), DType::F64, &device())?;
        let batch = split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), 3, None, None)?;
        runtime.forward_backward(&batch, &StepOptions::default())?;
        runtime.evaluate(&batch, &StepOptions::default())?;
        Ok(ctx.device().is_cpu())
    });
    if !on_host[0] {
        return skip("it compares addresses, and a tensor moves from GPU to GPU");
    }
    let places = places.lock().unwrap();
    for training in [false, true] {
        for microbatch in 0..3 {
            let at = |what: &str| places[&format!("{what} {training} {microbatch}")];
            assert_eq!(at("plain made"), at("plain taken"));
            // A variable stands for what is differentiated on each stage anew, which candle makes as a copy.
            assert_eq!(at("learned made") == at("learned taken"), !training);
            assert_ne!(at("weight made"), at("weight taken"), "an optimizer writes to parameters");
            assert_ne!(at("weight made"), at("row taken"), "nor are parts of parameters handed over");
        }
    }
}

/// A `HashMap` has an order of its own in each process; the values of a message are found by their keys.
#[test]
fn maps_and_integers_pass_between_stages_with_their_gradients() {
    let names = ["a", "b", "c", "d", "e"];
    let declare = move || -> Result<candle_pipe::Pipe<Vb>> {
        let mut g = PipeBuilder::<Vb>::new();
        let x = g.input("x", In::Arg);
        let weight = g.parameter("weight", Share::Replicate, |vb| Ok(vb.get((2, 2), "weight")?));
        let make = move |xs: &[Value], _: &candle_pipe::Ctx| {
            let y = xs[0].tensor()?.matmul(xs[1].tensor()?)?;
            let part = |(i, name): (usize, &&str)| Ok((name.to_string(), (&y * (i + 1) as f64)?));
            let parts = names.iter().enumerate().map(part).collect::<Result<HashMap<String, Tensor>>>()?;
            let ids = Tensor::arange(0u32, y.dim(0)? as u32, y.device())?;
            Ok((Value::from(parts), ids, 3usize, 4u32).into())
        };
        let made = g.func("make", make, [x, weight]);
        g.split();
        let take = move |xs: &[Value], _: &candle_pipe::Ctx| {
            let (parts, ids) = (xs[0].at(0)?, xs[0].at(1)?.tensor()?.to_dtype(DType::F64)?);
            let factor = (xs[0].at(2)?.int()? * 10 + xs[0].at(3)?.int()?) as f64;
            let mut sum = (parts.get("a")?.tensor()? * factor)?.broadcast_mul(&ids.unsqueeze(1)?)?;
            for (i, name) in names.iter().enumerate().skip(1) {
                sum = (sum + (parts.get(name)?.tensor()?.sqr()? * i as f64)?)?;
            }
            Ok(sum.into())
        };
        let sum = g.func("take", take, [made]);
        g.loss_fn(|xs, _| Ok(xs[0].tensor()?.mean_all()?), [sum], LossReduction::Mean);
        g.finish(SplitSpec::declared())
    };
    let step = move || -> Result<_> {
        let x = Tensor::arange(0f64, 12., &device())?.sin()?.reshape((6, 2))?;
        split_args_kwargs_into_chunks(&[x.into()], &Kwargs::new(), 3, None, None)
    };
    let vb = || {
        let values = [("weight".to_string(), Tensor::new(&[[0.5f64, -1.0], [2.0, 0.25]], &device())?)];
        builder(&values.into(), DType::F64)
    };
    let numbers = |loss: &Tensor, grad: &Tensor| -> Result<Vec<f64>> {
        Ok([vec![loss.to_scalar::<f64>()?], grad.flatten_all()?.to_vec1()?].concat())
    };
    let local = LocalPipe::new(&declare().unwrap(), &vb().unwrap(), &device()).unwrap();
    let made = local.forward_backward(&step().unwrap(), &StepOptions::default()).unwrap();
    let var = local.named_vars().unwrap().remove(0).1;
    let want = numbers(made.loss().unwrap(), made.grads.get(&var).unwrap()).unwrap();
    let found = on_ranks(2, "maps", move |ctx| -> Result<Option<Vec<f64>>> {
        let schedule = ScheduleKind::OneFOneB.schedule(2, 3, 1)?;
        let runtime = Runtime::new(&declare()?, &schedule, ctx.group(), &vb()?, &device())?;
        let made = runtime.forward_backward(&step()?, &StepOptions::default())?.step;
        let (loss, mine) = (made.loss().ok().cloned(), runtime.named_vars()?);
        let grad = mine.first().and_then(|(_, var)| made.grads.get(var)).cloned();
        let loss = ctx
            .group()
            .all_gather(&loss.unwrap_or(Tensor::zeros((), DType::F64, &device())?).unsqueeze(0)?, 0)?
            .sum_all()?;
        grad.map(|grad| numbers(&loss, &grad)).transpose()
    });
    let found: Vec<_> = found.into_iter().flatten().collect();
    assert!(!found.is_empty());
    for got in found {
        assert!(
            got.iter().zip(&want).all(|(a, b)| (a - b).abs() < 1e-12 * b.abs().max(1.0)),
            "{got:?} {want:?}"
        );
    }
}
