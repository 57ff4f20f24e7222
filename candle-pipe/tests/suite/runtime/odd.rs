//! A model of odd parts, on odd groups, over steps of unlike shapes: what passes through unchanged, twice, detached, empty
//! or as anything but a tensor; a loss in the middle, and stages without parameters.
use crate::runtime::model::{Values, Vb, builder, numbers};
use crate::runtime::parity::close;
use candle_core::{DType, Tensor};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::schedule::ScheduleKind;
use candle_pipe::{
    Ctx, EqualCount, In, Keep, Kwargs, LocalPipe, LossReduction, Pipe, PipeBuilder, Result, Runtime,
};
use candle_pipe::{StepOptions, Value, nn};
use std::collections::BTreeMap;
use std::sync::Arc;
use test_utils::{device, on_ranks};

const WIDTH: usize = 4;
const MICROBATCHES: usize = 6;

fn pack(xs: &[Value], ctx: &Ctx) -> Result<Value> {
    let (h, ids, x) = (xs[0].tensor()?, xs[1].tensor()?, xs[2].tensor()?);
    let tensors = [h.clone(), h.clone(), ids.clone(), ids.gt(2u32)?, ids.to_dtype(DType::I64)?, h.detach()];
    // Of one microbatch there is nothing left.
    let some = h.narrow(0, 0, usize::from(ctx.microbatch != 1))?;
    let plain = ("text", (), [Value::from(3), f64::NAN.into(), true.into()]);
    Ok((tensors, some, plain, BTreeMap::from([("x", x)])).into())
}

fn unpack(xs: &[Value], _: &Ctx) -> Result<Value> {
    let ([tensors, some, plain, map], constant) = (xs[0].items()?, xs[1].tensor()?) else {
        panic!("{}", xs[0])
    };
    assert_eq!(plain.to_string(), r#"("text", none, [3, NaN, true])"#);
    let part = |i: usize| tensors.at(i)?.tensor();
    let dtype = part(0)?.dtype();
    let mask = part(3)?.to_dtype(dtype)?.unsqueeze(1)?;
    let sum = ((part(0)? + (part(1)? * 2.0)?)?.broadcast_mul(&mask)? + map.get("x")?.tensor()?)?;
    let ids = part(4)?.to_dtype(dtype)?.unsqueeze(1)?;
    let sum = (sum.broadcast_add(&ids)? + part(5)?)?.broadcast_mul(constant)?;
    Ok(match some.tensor()?.elem_count() {
        0 => sum.into(),
        _ => sum.broadcast_add(some.tensor()?)?.into(),
    })
}

/// The model cut into so many stages.
fn pipe(stages: usize) -> Result<Pipe<Vb>> {
    let mut g = PipeBuilder::<Vb>::new();
    let (x, ids) = (g.input("x", In::Arg), g.input("ids", In::Kwarg));
    let lookup = |vb: &Vb| {
        let weight = vb.get((5, WIDTH), "weight")?;
        Ok(candle_pipe::stage_op(move |xs, _| Ok(vec![weight.index_select(xs[0].tensor()?, 0)?.into()])))
    };
    let embedded = g.module("embed", lookup, [ids]);
    let made = |_: &[Value], ctx: &Ctx| {
        Ok(Tensor::arange(1f64, 1. + WIDTH as f64, &ctx.device)?
            .to_dtype(ctx.dtype)?
            .affine(0.25, 0.0)?
            .into())
    };
    let constant = g.func("constant", made, []);
    let packed = g.func("pack", pack, [embedded, ids, x]);
    let relayed = g.func("relay", |xs, _| Ok(xs[0].clone()), [packed]);
    let h = g.func("unpack", unpack, [relayed, constant]);
    let h = g.module("layer", |vb| Ok(nn::linear(WIDTH, WIDTH, vb.clone())?), [h]);
    let [square, places] = g.func_many(
        "two",
        |xs, _| Ok([xs[0].tensor()?.sqr()?.into(), xs[0].tensor()?.argmax(1)?.into()]),
        [h],
    );
    let mean = |xs: &[Value], _: &Ctx| Ok(xs[0].tensor()?.mean_all()?);
    let loss = g.loss_fn(mean, [square], LossReduction::Mean);
    let scale = |xs: &[Value], _: &Ctx| Ok(xs[0].tensor()?.broadcast_mul(xs[1].tensor()?)?.into());
    let scaled = g.func("after", scale, [h, loss]);
    let last = g.func("last", |xs, _| Ok(xs[0].clone()), [scaled]);
    for (name, value) in [("packed", relayed), ("places", places), ("last", last), ("square", square)] {
        g.output(name, value);
    }
    g.finish(EqualCount(stages))
}

fn values(dtype: DType) -> Result<Values> {
    let wave = |dims: &[usize], seed: f64| -> Result<Tensor> {
        let count = dims.iter().product::<usize>() as f64;
        Ok(Tensor::arange(0f64, count, &device())?
            .affine(0.9, seed)?
            .sin()?
            .reshape(dims)?
            .to_dtype(dtype)?)
    };
    let all = [
        ("embed.weight", wave(&[5, WIDTH], 0.0)?),
        ("layer.weight", wave(&[WIDTH, WIDTH], 1.0)?),
        ("layer.bias", wave(&[WIDTH], 2.0)?),
    ];
    Ok(all.into_iter().map(|(name, value)| (name.to_string(), value)).collect())
}

fn batch(rows: usize, dtype: DType, first: f64) -> Result<Microbatches> {
    let x = Tensor::arange(0f64, (rows * WIDTH) as f64, &device())?.cos()?;
    let x = Tensor::cat(&[Tensor::new(&[first], &device())?, x.narrow(0, 1, rows * WIDTH - 1)?], 0)?;
    let ids: Vec<u32> = (0..rows as u32).map(|row| row * 7 % 5).collect();
    let kwargs = Kwargs::from([("ids".to_string(), Tensor::new(ids, &device())?.into())]);
    let x = x.reshape((rows, WIDTH))?.to_dtype(dtype)?;
    split_args_kwargs_into_chunks(&[x.into()], &kwargs, MICROBATCHES, None, None)
}

/// Whatever the group, the cut and the shapes, forwards are those of one stage bit by bit, and gradients close.
fn check(dtype: DType, tolerance: f64, first: f64) {
    let values = Arc::new(values(dtype).unwrap());
    for (kind, members) in [
        (ScheduleKind::OneFOneB, &[0, 1][..]),
        (ScheduleKind::ZbH1, &[2, 0, 1]),
        (ScheduleKind::Zbv, &[2, 1]),
        (ScheduleKind::DualPipeV, &[1, 2, 0]),
        (ScheduleKind::LoopedBfs, &[1]),
    ] {
        let values = values.clone();
        let label = format!("{kind} {dtype:?}");
        on_ranks(3, &label.clone(), move |ctx| -> Result<()> {
            if !members.contains(&ctx.rank()) {
                return Ok(());
            }
            let group = ctx.group().subgroup(members)?;
            let schedule = kind.schedule(members.len(), MICROBATCHES, kind.stages_per_rank())?;
            let pipe = pipe(schedule.stages())?;
            let runtime = || Runtime::new(&pipe, &schedule, &group, &builder(&values, dtype)?, &device());
            let runtimes = [runtime()?, runtime()?];
            let whole = LocalPipe::new(&self::pipe(1)?, &builder(&values, dtype)?, &device())?;
            for (step, rows) in [(0, 6), (1, 13), (2, 8)] {
                let batch = batch(rows, dtype, first)?;
                let keep = if step == 1 { Keep::Inputs } else { Keep::Activations };
                let options = StepOptions::default().step(step).keep(keep);
                let want = whole.forward_backward(&batch, &options)?;
                for runtime in &runtimes {
                    let evaluated = runtime.evaluate(&batch, &StepOptions::default())?.step;
                    let made = runtime.forward_backward(&batch, &options)?.step;
                    for (i, want) in want.outputs.iter().enumerate() {
                        for (name, got) in made.outputs[i].map()? {
                            assert!(got.same(want.get(name)?)?, "{label}: {name} {got}");
                            assert!(evaluated.outputs[i].get(name)?.same(got)?, "{label}: evaluated {name}");
                        }
                    }
                    for (got, want) in made.losses.iter().zip(&want.losses) {
                        assert!(Value::from(got).same(&want.into())?, "{label}: losses");
                    }
                    for (name, parameter) in runtime.stages().flat_map(|stage| stage.parameters()) {
                        let grad = |grads: &candle_core::backprop::GradStore, parameter: &Tensor| {
                            numbers(
                                grads
                                    .get(parameter)
                                    .unwrap_or_else(|| panic!("{label}: no gradient of {name}")),
                            )
                        };
                        let want = grad(&want.grads, whole.parameters()[name.as_str()])?;
                        let got = grad(&made.grads, parameter)?;
                        if first.is_nan() {
                            let nans =
                                |numbers: &[f64]| numbers.iter().map(|x| x.is_nan()).collect::<Vec<_>>();
                            assert_eq!(nans(&got), nans(&want), "{label}: {name}");
                        } else {
                            close(&got, &want, tolerance, &format!("{label}: gradient of {name}"));
                        }
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn odd_parts_pass_between_stages_as_they_are() {
    check(DType::F64, 1e-12, 1.0);
}

#[test]
fn so_do_they_in_half_precision() {
    check(DType::F16, 2e-2, 1.0);
}

#[test]
fn a_loss_that_is_no_number_is_passed_on() {
    check(DType::F64, 1e-12, f64::NAN);
}
