//! A model with everything that a cut can get wrong: skips over several stages with several users, a tuple, arguments
//! used in the middle and at the end, plain values, dropout, and parameters shared in both ways.
use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{VarBuilder, VarMap};
use candle_pipe::microbatch::{Microbatches, split_args_kwargs_into_chunks};
use candle_pipe::nn::{Dropout, Linear, linear};
use candle_pipe::{Ctx, stage_op};
use candle_pipe::{
    EqualCount, In, Kwargs, LocalPipe, LossReduction, Pipe, PipeBuilder, Result, Share, StepOptions, Value,
};
use candle_shard::random::{Distribution, Stream, sample_full};
use std::collections::HashMap;
use test_utils::device;

pub(crate) type Vb = VarBuilder<'static>;

/// The number of blocks in the middle.
const BLOCKS: usize = 14;
const WIDTH: usize = 4;

fn block(linear: &Linear, xs: &[Value], _: &Ctx) -> Result<Vec<Value>> {
    let h = candle_nn::Module::forward(linear, xs[0].tensor()?)?.tanh()?;
    Ok(vec![(h + xs[0].tensor()?)?.into()])
}

/// The model cut into so many stages of about equally many nodes.
pub(crate) fn pipe(stages: usize, drop: bool) -> Result<Pipe<Vb>> {
    let mut g = PipeBuilder::<Vb>::new();
    let x = g.input("x", In::Arg);
    let (mask, target) = (g.input("mask", In::Kwarg), g.input("target", In::Kwarg));
    let scale = g.input_or("scale", 0.5);
    let init = candle_nn::Init::Randn { mean: 0.0, stdev: 0.5 };
    let tied = g.parameter("tied", Share::Replicate, move |vb| {
        Ok(vb.get_with_hints((WIDTH, WIDTH), "tied", init)?)
    });
    let gate = g.parameter("gate", Share::Transmit, move |vb| Ok(vb.get_with_hints(WIDTH, "gate", init)?));
    let first = g.module("first", |vb| Ok(linear(3, WIDTH, vb.clone())?), [x]);
    let mut h = g.func("tie_in", |xs, _| Ok(xs[0].tensor()?.matmul(xs[1].tensor()?)?.into()), [first, tied]);
    let mut side = h;
    for i in 0..BLOCKS {
        let name = format!("blocks.{i}");
        h = g.module(
            &name,
            |vb| {
                let layer = linear(WIDTH, WIDTH, vb.clone())?;
                Ok(stage_op(move |xs, ctx| block(&layer, xs, ctx)))
            },
            [h],
        );
        match i {
            2 => {
                // A tuple, of which one part is used much later, twice.
                let split = |xs: &[Value], _: &Ctx| {
                    let x = xs[0].tensor()?;
                    Ok([(x * 0.9)?.into(), x.sqr()?.into()])
                };
                [h, side] = g.func_many("fork", split, [h]);
            }
            5 => {
                let gated = |xs: &[Value], _: &Ctx| {
                    Ok((xs[0].tensor()?.broadcast_mul(xs[1].tensor()?)? * xs[2].float()?)?.into())
                };
                h = g.func("gate_in", gated, [h, gate, scale]);
            }
            7 if drop => {
                let dropout = Dropout::new(0.4, 11, "drop")?;
                h = g.func("drop", move |xs, ctx| Ok(dropout.forward(xs[0].tensor()?, ctx)?.into()), [h]);
            }
            9 => h = g.func("join", |xs, _| Ok((xs[0].tensor()? + xs[1].tensor()?)?.into()), [h, side]),
            11 => {
                let masked = |xs: &[Value], _: &Ctx| Ok((xs[0].tensor()? * xs[1].tensor()?)?.into());
                h = g.func("mask", masked, [h, mask]);
            }
            _ => {}
        }
    }
    let last = |xs: &[Value], _: &Ctx| {
        let h =
            (xs[0].tensor()?.matmul(xs[1].tensor()?)?.broadcast_mul(xs[2].tensor()?)? + xs[3].tensor()?)?;
        Ok((h + xs[4].tensor()?)?.into())
    };
    let y = g.func("last", last, [h, tied, gate, first, side]);
    g.output("y", y);
    g.output("first", first);
    let loss = |xs: &[Value], _: &Ctx| Ok((xs[0].tensor()? - xs[1].tensor()?)?.sqr()?.mean_all()?);
    g.loss_fn(loss, [y, target], LossReduction::Mean);
    g.finish(EqualCount(stages))
}

/// Values for all parameters.
pub(crate) type Values = HashMap<String, Tensor>;

pub(crate) fn values(dtype: DType) -> Result<Values> {
    let map = VarMap::new();
    LocalPipe::new(&pipe(1, false)?, &VarBuilder::from_varmap(&map, dtype, &device()), &device())?;
    let data = map.data().lock().unwrap();
    let normal = Distribution::Normal { mean: 0.0, stdev: 0.4 };
    let value = |(name, var): (&String, &Var)| {
        Ok((name.clone(), sample_full(Stream::new(7, name), normal, var.dims(), dtype, &Device::Cpu)?))
    };
    data.iter().map(value).collect()
}

/// A builder that gives variables with these values, copies of its own.
pub(crate) fn builder(values: &Values, dtype: DType) -> Result<Vb> {
    let device = device();
    let map = VarMap::new();
    {
        let mut data = map.data().lock().unwrap();
        for (name, value) in values {
            data.insert(name.clone(), Var::from_tensor(&value.to_device(&device)?)?);
        }
    }
    Ok(VarBuilder::from_varmap(&map, dtype, &device))
}

pub(crate) fn arguments(rows: usize, dtype: DType) -> Result<(Vec<Value>, Kwargs)> {
    let wave = |width: usize, seed: f64| -> Result<Value> {
        let x = Tensor::arange(0f64, (rows * width) as f64, &Device::Cpu)?.affine(0.7, seed)?.sin()?;
        Ok(x.reshape((rows, width))?.to_dtype(dtype)?.to_device(&device())?.into())
    };
    let kwargs = [("mask", wave(WIDTH, 1.0)?), ("target", wave(WIDTH, 2.0)?), ("scale", 0.75.into())];
    Ok((vec![wave(3, 0.0)?], kwargs.into_iter().map(|(name, value)| (name.to_string(), value)).collect()))
}

pub(crate) fn batch(rows: usize, microbatches: usize, dtype: DType) -> Result<Microbatches> {
    let (args, kwargs) = arguments(rows, dtype)?;
    split_args_kwargs_into_chunks(&args, &kwargs, microbatches, None, None)
}

/// Loss, outputs and gradients by name.
#[derive(Clone)]
pub(crate) struct Expected {
    pub(crate) loss: f64,
    pub(crate) outputs: HashMap<&'static str, Vec<f64>>,
    pub(crate) grads: HashMap<String, Vec<f64>>,
}

pub(crate) fn numbers(tensor: &Tensor) -> Result<Vec<f64>> {
    Ok(tensor.flatten_all()?.to_dtype(DType::F64)?.to_vec1()?)
}

/// The uncut model on the whole batch.
pub(crate) fn uncut(values: &Values, rows: usize, dtype: DType, drop: bool) -> Result<Expected> {
    let whole = LocalPipe::new(&pipe(1, drop)?, &builder(values, dtype)?, &device())?;
    let batch = batch(rows, 1, dtype)?;
    let step = whole.forward_backward(&batch, &StepOptions::default().step(3))?;
    let output =
        |name: &'static str| -> Result<_> { Ok((name, numbers(step.outputs[0].get(name)?.tensor()?)?)) };
    let grads = whole.parameters().into_iter().map(|(name, parameter)| {
        Ok((name.to_string(), numbers(step.grads.get(parameter).expect("every parameter has a gradient"))?))
    });
    Ok(Expected {
        loss: numbers(step.loss()?)?[0],
        outputs: [output("y")?, output("first")?].into(),
        grads: grads.collect::<Result<_>>()?,
    })
}
