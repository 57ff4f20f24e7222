//! Losses of unlike microbatches: means over what is valid, sums, and microbatches that are masked.
use crate::runtime::model::{Vb, numbers};
use crate::runtime::parity::close;
use candle_core::{DType, Tensor};
use candle_dist::{DataParallelOptions, DeviceMesh, ReduceOp};
use candle_nn::{VarBuilder, VarMap};
use candle_pipe::microbatch::{Microbatches, Splitter, split_args_kwargs_into_chunks};
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    In, Keep, Kwargs, LocalPipe, LossReduction, Pipe, PipeBuilder, Result, Runtime, SplitSpec, StepOptions,
    Value, nn,
};
use candle_shard::random::{Distribution, Stream, sample_full};
use std::collections::HashMap;
use test_utils::{device, on_ranks};

const ROWS: usize = 10;
/// Tokens of a row.
const TOKENS: usize = 3;
/// The number of valid tokens in each row.
const VALID: [usize; ROWS] = [3, 0, 1, 2, 0, 0, 3, 3, 1, 2];

/// How the model makes its loss.
#[derive(Debug, Clone, Copy, PartialEq)]
enum How {
    /// A mean over valid tokens, as a sum and a count.
    Counted,
    Mean,
    Sum,
}

/// Three layers, in as many stages as there are cuts; dropout between them follows the rows.
fn declare(how: How, stages: usize) -> Result<Pipe<Vb>> {
    let mut g = PipeBuilder::<Vb>::new();
    let (x, target) = (g.input("x", In::Arg), g.input("target", In::Kwarg));
    let valid = (how == How::Counted).then(|| g.input("valid", In::Kwarg));
    // Not cut, and with as many elements as there are rows: no rows.
    let scale = g.input("scale", In::Kwarg);
    let mut h = x;
    for i in 0..3 {
        if (1..stages).contains(&i) {
            g.split();
        }
        h = g.module(&format!("layers.{i}"), |vb| Ok(nn::linear(4, 4, vb.clone())?), [h]);
        let drop = nn::Dropout::new(0.3, 5, &format!("drop.{i}"))?;
        h = g.func(
            &format!("act.{i}"),
            move |xs, ctx| Ok(drop.forward(&(xs[0].tensor()?.sin()? + 0.3)?, ctx)?.into()),
            [h],
        );
    }
    g.output("y", h);
    let squares = |xs: &[Value]| -> Result<Tensor> {
        let all = (xs[0].tensor()? - xs[1].tensor()?)?.sqr()?.sum(1)?;
        Ok((all * xs[2].tensor()?.mean_all()?.to_scalar::<f64>()?)?)
    };
    match valid {
        Some(valid) => g.loss_counted(
            move |xs, _| {
                let valid = xs[3].tensor()?;
                Ok(((squares(xs)? * valid)?.sum_all()?, valid.sum_all()?.into()))
            },
            [h, target, scale, valid],
        ),
        None if how == How::Mean => {
            g.loss_fn(move |xs, _| Ok(squares(xs)?.mean_all()?), [h, target, scale], LossReduction::Mean)
        }
        None => g.loss_fn(move |xs, _| Ok(squares(xs)?.sum_all()?), [h, target, scale], LossReduction::Sum),
    };
    g.finish(SplitSpec::declared())
}

fn wave(dims: &[usize], seed: f64) -> Result<Tensor> {
    let len = dims.iter().product::<usize>() as f64;
    Ok(Tensor::arange(0f64, len, &device())?.affine(0.7, seed)?.sin()?.reshape(dims)?)
}

/// Rows of the batch, with several tokens in each: what a microbatch cuts are the tokens of its rows.
fn batch(how: How, rows: std::ops::Range<usize>, splitter: Splitter) -> Result<Microbatches> {
    let cut =
        |t: Tensor| -> Result<Value> { Ok(t.narrow(0, rows.start * TOKENS, rows.len() * TOKENS)?.into()) };
    let valid = VALID.iter().flat_map(|&n| (0..TOKENS).map(move |i| f64::from(u8::from(i < n))));
    let valid = Tensor::from_iter(valid, &device())?;
    let mut kwargs = Kwargs::from([("target".into(), cut(wave(&[ROWS * TOKENS, 4], 1.0)?)?)]);
    if how == How::Counted {
        kwargs.insert("valid".into(), cut(valid)?);
    }
    let tokens = (rows.len() * TOKENS) as f64;
    let scale = Tensor::arange(0f64, tokens, &device())?.affine(1.0, 0.7 - (tokens - 1.0) / 2.0)?;
    kwargs.insert("scale".into(), scale.into());
    let split = candle_pipe::microbatch::TensorChunkSpec(0);
    let names = kwargs.keys().map(|name| match name.as_str() {
        "scale" => (name.clone(), candle_pipe::microbatch::Replicate),
        _ => (name.clone(), split.into()),
    });
    let specs = names.collect();
    splitter.split(&[cut(wave(&[ROWS * TOKENS, 4], 0.0)?)?], &kwargs, None, Some(&specs))
}

fn parameters() -> Result<Vb> {
    let map = VarMap::new();
    let vb = VarBuilder::from_varmap(&map, DType::F64, &device());
    LocalPipe::new(&declare(How::Sum, 1)?, &vb, &device())?;
    for (name, var) in map.data().lock().unwrap().iter() {
        let normal = Distribution::Normal { mean: 0.0, stdev: 0.6 };
        var.set(&sample_full(Stream::new(7, name), normal, var.dims(), DType::F64, &device())?)?;
    }
    Ok(vb)
}

/// Loss and gradients, and the loss in evaluation.
struct Expected {
    loss: f64,
    evaluated: f64,
    grads: HashMap<String, Vec<f64>>,
}

fn alone(how: How) -> Result<Expected> {
    let local = LocalPipe::new(&declare(how, 1)?, &parameters()?, &device())?;
    let whole = batch(how, 0..ROWS, Splitter::new(1))?;
    let step = local.forward_backward(&whole, &StepOptions::default())?;
    let grads = local.parameters().into_iter();
    let grads = grads.map(|(name, p)| Ok((name.to_owned(), numbers(step.grads.get(p).unwrap())?)));
    let evaluated = numbers(local.evaluate(&whole, &StepOptions::default())?.loss()?)?[0];
    Ok(Expected { loss: numbers(step.loss()?)?[0], evaluated, grads: grads.collect::<Result<_>>()? })
}

#[test]
fn a_mean_over_valid_tokens_is_that_of_one_device_in_one_process() -> Result<()> {
    let how = How::Counted;
    let Expected { loss, evaluated, grads } = alone(how)?;
    let means = alone(How::Mean)?;
    assert!((loss - means.loss).abs() > 1e-3, "the mean over valid tokens is another than that over all");
    for stages in 1..=3 {
        let local = LocalPipe::new(&declare(how, stages)?, &parameters()?, &device())?;
        for chunks in [1, 2, 3, 4, ROWS * TOKENS] {
            let cut = batch(how, 0..ROWS, Splitter::new(chunks))?;
            for split_backward in [false, true] {
                let options = StepOptions::default().split_backward(split_backward);
                let step = local.forward_backward(&cut, &options)?;
                close(&numbers(step.loss()?)?, &[loss], 1e-12, "loss");
                assert_eq!(step.counts.iter().sum::<f64>(), VALID.iter().sum::<usize>() as f64);
                for (name, parameter) in local.parameters() {
                    close(&numbers(step.grads.get(parameter).unwrap())?, &grads[name], 1e-12, name);
                }
            }
            close(
                &numbers(local.evaluate(&cut, &StepOptions::default())?.loss()?)?,
                &[evaluated],
                1e-12,
                "evaluated",
            );
        }
    }
    Ok(())
}

#[test]
fn a_mean_over_valid_tokens_is_that_of_one_device_on_ranks_and_replicas() {
    let how = How::Counted;
    for (dp, pp, kind) in [(1, 2, "gpipe"), (1, 3, "1f1b"), (2, 1, "gpipe"), (2, 2, "zb-h1"), (3, 1, "gpipe")]
    {
        on_ranks(dp * pp, kind, move |ctx| -> Result<()> {
            let want = alone(how)?;
            let mesh = DeviceMesh::new(ctx.group(), &[("pp", pp), ("dp", dp)])?;
            let schedule = kind.parse::<ScheduleKind>()?.schedule(pp, 3, 1)?;
            let pipe = declare(how, pp)?;
            let runtime = Runtime::new(&pipe, &schedule, mesh.axis_group("pp")?, &parameters()?, &device())?;
            let runtime = match dp {
                1 => runtime,
                _ => runtime.with_replicas(mesh.axis_group("dp")?, &DataParallelOptions::default())?,
            };
            // Replicas of unlike numbers of rows.
            let ends = [0, ROWS / dp - 1, 2 * ROWS / dp, ROWS];
            let replica = mesh.local_rank("dp")?;
            let rows = ends[replica]..if replica + 1 == dp { ROWS } else { ends[replica + 1] };
            let first_row = rows.start * TOKENS;
            let cut = batch(how, rows, Splitter::new(3))?;
            let options = StepOptions::default().first_row(first_row);
            let made = runtime.forward_backward(&cut, &options)?.step;
            if let Ok(loss) = made.loss() {
                close(&numbers(loss)?, &[want.loss], 1e-12, "loss");
            }
            for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
                close(&numbers(made.grads.get(parameter).unwrap())?, &want.grads[name], 1e-12, name);
            }
            if let Ok(loss) = runtime.evaluate(&cut, &StepOptions::default())?.step.loss() {
                close(&numbers(loss)?, &[want.evaluated], 1e-12, "evaluated");
            }
            Ok(())
        });
    }
}

/// Where something else averages the gradients of the replicas, as fully sharded parameters do.
#[test]
fn a_mean_over_valid_tokens_is_that_of_one_device_beside_replicas() {
    let how = How::Counted;
    on_ranks(4, "beside", move |ctx| -> Result<()> {
        let want = alone(how)?;
        let mesh = DeviceMesh::new(ctx.group(), &[("pp", 2), ("dp", 2)])?;
        let schedule = ScheduleKind::OneFOneB.schedule(2, 3, 1)?;
        let replicas = mesh.axis_group("dp")?;
        let runtime =
            Runtime::new(&declare(how, 2)?, &schedule, mesh.axis_group("pp")?, &parameters()?, &device())?
                .beside(replicas)?;
        let rows = [0..4, 4..ROWS][mesh.local_rank("dp")?].clone();
        let options = StepOptions::default().first_row(rows.start * TOKENS);
        let made = runtime.forward_backward(&batch(how, rows, Splitter::new(3))?, &options)?.step;
        if let Ok(loss) = made.loss() {
            close(&numbers(loss)?, &[want.loss], 1e-12, "loss");
        }
        for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
            let mean = replicas.all_reduce(made.grads.get(parameter).unwrap(), ReduceOp::Avg)?;
            close(&numbers(&mean)?, &want.grads[name], 1e-12, name);
        }
        Ok(())
    });
}

#[test]
fn losses_that_count_nothing_are_refused_by_all_ranks() {
    on_ranks(2, "nothing", |ctx| -> Result<()> {
        let how = How::Counted;
        let schedule = ScheduleKind::GPipe.schedule(2, 2, 1)?;
        let runtime = Runtime::new(&declare(how, 2)?, &schedule, ctx.group(), &parameters()?, &device())?;
        let nothing = batch(how, 4..6, Splitter::new(2))?;
        let said = runtime.forward_backward(&nothing, &StepOptions::default()).unwrap_err().to_string();
        assert!(said.contains("the losses of the batch count 0"), "{said}");
        let weights = StepOptions::default().weights(vec![1.0; 2]);
        let said =
            runtime.forward_backward(&batch(how, 0..2, Splitter::new(2))?, &weights).unwrap_err().to_string();
        assert!(said.contains("weights for a loss that counts by itself"), "{said}");
        // All can go on.
        runtime.forward_backward(&batch(how, 0..2, Splitter::new(2))?, &StepOptions::default())?;
        Ok(())
    });
}

#[test]
fn masked_microbatches_have_the_losses_and_gradients_of_those_that_are_not() -> Result<()> {
    for how in [How::Mean, How::Sum, How::Counted] {
        let want = alone(how)?;
        let local = LocalPipe::new(&declare(how, 2)?, &parameters()?, &device())?;
        for chunks in [1, 3, 4] {
            let masked = batch(how, 0..ROWS, Splitter::new(chunks).masked())?;
            let plain = batch(how, 0..ROWS, Splitter::new(chunks))?;
            let (masked, plain) = (
                local.forward_backward(&masked, &StepOptions::default())?,
                local.forward_backward(&plain, &StepOptions::default())?,
            );
            close(&numbers(masked.loss()?)?, &[want.loss], 1e-12, &format!("{how:?}: loss"));
            for (a, b) in masked.losses.iter().zip(&plain.losses) {
                close(&numbers(a)?, &numbers(b)?, 1e-12, &format!("{how:?}: loss of a microbatch"));
            }
            for (name, parameter) in local.parameters() {
                let got = numbers(masked.grads.get(parameter).unwrap())?;
                close(&got, &want.grads[name], 1e-12, &format!("{how:?}: {name}"));
            }
        }
        let masked = batch(how, 0..ROWS, Splitter::new(4).masked())?;
        close(
            &numbers(local.evaluate(&masked, &StepOptions::default())?.loss()?)?,
            &[want.evaluated],
            1e-12,
            &format!("{how:?}: evaluated"),
        );
    }
    Ok(())
}

#[test]
fn masked_microbatches_on_ranks() {
    for (ranks, kind) in [(2, ScheduleKind::GPipe), (3, ScheduleKind::ZbH1)] {
        on_ranks(ranks, "masked", move |ctx| -> Result<()> {
            for how in [How::Mean, How::Sum, How::Counted] {
                let want = alone(how)?;
                let schedule = kind.schedule(ranks, 4, 1)?;
                let runtime =
                    Runtime::new(&declare(how, ranks)?, &schedule, ctx.group(), &parameters()?, &device())?;
                let masked = batch(how, 0..ROWS, Splitter::new(4).masked())?;
                let made = runtime.forward_backward(&masked, &StepOptions::default())?.step;
                if let Ok(loss) = made.loss() {
                    close(&numbers(loss)?, &[want.loss], 1e-12, "loss");
                }
                for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
                    close(&numbers(made.grads.get(parameter).unwrap())?, &want.grads[name], 1e-12, name);
                }
            }
            Ok(())
        });
    }
}

/// The rank that makes the loss has no `x`, of which its rows are made.
#[test]
fn masked_microbatches_on_ranks_that_give_what_their_stages_use_and_no_more() {
    for (ranks, kind) in [(2, ScheduleKind::GPipe), (3, ScheduleKind::OneFOneB)] {
        on_ranks(ranks, "masked, their own", move |ctx| -> Result<()> {
            let mut g = PipeBuilder::<Vb>::new();
            let x = g.input("x", In::Kwarg);
            let mut h = x;
            for i in 0..ranks {
                if i > 0 {
                    g.split();
                }
                h = g.module(&format!("layers.{i}"), |vb| Ok(nn::linear(4, 4, vb.clone())?), [h]);
            }
            // Rows of zeros do not stay zero: layers have biases.
            g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.sum_all()?), [h], LossReduction::Sum);
            let pipe = g.finish(SplitSpec::declared())?;
            let schedule = kind.schedule(ranks, 4, 1)?;
            let map = VarMap::new();
            let vb = VarBuilder::from_varmap(&map, DType::F64, &device());
            let runtime = Runtime::new(&pipe, &schedule, ctx.group(), &vb, &device())?;
            for var in map.all_vars() {
                var.set(&wave(var.dims(), 0.4)?)?;
            }
            let x: Kwargs = Kwargs::from([("x".into(), wave(&[ROWS, 4], 0.0)?.into())]);
            let mine = if ctx.rank() == 0 { x.clone() } else { Kwargs::new() };
            let plain = Splitter::new(4).split(&[], &x, None, None)?;
            let masked = Splitter::new(4).masked().rows(ROWS).split(&[], &mine, None, None)?;
            let want = runtime.forward_backward(&plain, &StepOptions::default())?.step;
            let got = runtime.forward_backward(&masked, &StepOptions::default())?.step;
            if let (Ok(got), Ok(want)) = (got.loss(), want.loss()) {
                close(&numbers(got)?, &numbers(want)?, 1e-12, "loss");
            }
            for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
                let [got, want] = [&got, &want].map(|step| numbers(step.grads.get(parameter).unwrap()));
                close(&got?, &want?, 1e-12, name);
            }
            Ok(())
        });
    }
}

#[test]
fn a_masked_loss_of_what_has_no_rows_is_refused() -> Result<()> {
    let mut g = PipeBuilder::<()>::new();
    let x = g.input("x", In::Arg);
    let mean = g.func("mean", |xs, _| Ok(xs[0].tensor()?.mean(0)?.into()), [x]);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.sum_all()?), [mean], LossReduction::Mean);
    let local = LocalPipe::new(&g.finish(SplitSpec::declared())?, &(), &device())?;
    let x: Value = Tensor::ones((5, 3), DType::F64, &device())?.into();
    let masked = Splitter::new(2).masked().split(&[x], &Kwargs::new(), None, None)?;
    let said = local.evaluate(&masked, &StepOptions::default()).unwrap_err().to_string();
    assert!(
        said.contains("node \"loss\"") && said.contains("takes f64[3], whose dim 0 has no whole number"),
        "{said}"
    );
    Ok(())
}

/// Weights that the model computes would move by the gradient of the sum alone.
#[test]
fn a_count_with_a_gradient_is_refused_by_name() {
    fn declare(detached: bool) -> Result<candle_pipe::Pipe<Vb>> {
        let mut g = PipeBuilder::<Vb>::new();
        let x = g.input("x", In::Arg);
        let h = g.module("in", |vb| Ok(nn::linear(4, 4, vb.clone())?), [x]);
        g.split();
        let loss = move |xs: &[Value], _: &candle_pipe::Ctx| {
            let h = xs[0].tensor()?;
            let weights = candle_nn::ops::sigmoid(h)?;
            let weights = if detached { weights.detach() } else { weights };
            // Comparisons, the conditions of choices and integers have no gradient.
            let chosen = h.ge(0.5)?.where_cond(&h.ones_like()?, &h.zeros_like()?)?.sum_all()?;
            let count = (weights.sum_all()? + h.ge(0.0)?.to_dtype(DType::F64)?.sum_all()?)? + chosen;
            let count = count?;
            Ok(((h.sqr()? * weights)?.sum_all()?, count.into()))
        };
        g.loss_counted(loss, [h]);
        g.finish(SplitSpec::declared())
    }
    let x = || -> Result<Microbatches> {
        split_args_kwargs_into_chunks(&[wave(&[6, 4], 0.0)?.into()], &Kwargs::new(), 2, None, None)
    };
    let vb = || VarBuilder::from_varmap(&VarMap::new(), DType::F64, &device());
    on_ranks(2, "count", move |ctx| -> Result<()> {
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        for keep in [Keep::Activations, Keep::Inputs] {
            let options = StepOptions::default().keep(keep);
            let runtime = Runtime::new(&declare(true)?, &schedule, ctx.group(), &vb(), &device())?;
            runtime.forward_backward(&x()?, &options)?;
            LocalPipe::new(&declare(true)?, &vb(), &device())?.forward_backward(&x()?, &options)?;
            let local = LocalPipe::new(&declare(false)?, &vb(), &device())?;
            local.evaluate(&x()?, &StepOptions::default())?;
            let said = local.forward_backward(&x()?, &options).unwrap_err().to_string();
            assert!(
                said.contains("node \"loss\"")
                    && said.contains("the count of the loss, f64[], has a gradient"),
                "{said}"
            );
        }
        Ok(())
    });
    let texts = on_ranks(2, "count with a gradient", move |ctx| -> Result<String> {
        let schedule = ScheduleKind::OneFOneB.schedule(2, 2, 1)?;
        let runtime = Runtime::new(&declare(false)?, &schedule, ctx.group(), &vb(), &device())?;
        runtime.evaluate(&x()?, &StepOptions::default())?;
        Ok(runtime.forward_backward(&x()?, &StepOptions::default()).unwrap_err().to_string())
    });
    texts.iter().for_each(|text| assert!(text.contains("has a gradient"), "{text}"));
}
