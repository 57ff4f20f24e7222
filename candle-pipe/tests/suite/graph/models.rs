//! Models, each declared as a graph and written down plainly.
use crate::graph::common::{Args, Builder, Plain, Vb, numbers};
use candle_core::{DType, Device, IndexOp, Result, Tensor};
use candle_nn::Module;
use candle_pipe::graph::ValueId;
use candle_pipe::{In, LossReduction, PipeBuilder, PipeModule, Share, Value, nn, stage_op};
use std::collections::BTreeMap;

const WIDTH: usize = 4;

fn plain_linear(vb: &Vb, name: &str, x: &Tensor) -> Result<Tensor> {
    let path = name.split('.').fold(vb.clone(), |vb, part| vb.pp(part));
    candle_nn::linear(WIDTH, WIDTH, path)?.forward(x)
}

fn layer(g: &mut Builder, name: &str, x: ValueId) -> ValueId {
    g.module(name, |vb| Ok(nn::linear(WIDTH, WIDTH, vb.clone())?), [x])
}

fn mse(a: &Tensor, b: &Tensor) -> Result<Tensor> {
    (a - b)?.sqr()?.mean_all()
}

pub(crate) fn skips_args(rows: usize) -> Args {
    let kwargs = [
        ("labels", Value::from(numbers("labels", &[rows, WIDTH]))),
        ("mask", Value::from(numbers("mask", &[rows, WIDTH]).ge(0.0).unwrap())),
    ];
    Args {
        args: vec![numbers("x", &[rows, WIDTH]).into()],
        kwargs: kwargs.map(|(name, value)| (name.to_owned(), value)).into(),
    }
}

/// Skips over several layers with several users, a module with two results, arguments that late layers use, and a
/// default.
pub(crate) fn skips() -> Builder {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let (labels, mask) = (g.input("labels", In::Kwarg), g.input("mask", In::Kwarg));
    let scale = g.input_or("scale", 0.5);
    let h0 = layer(&mut g, "layers.0", x);
    let h1 = layer(&mut g, "layers.1", h0);
    let h2 = layer(&mut g, "layers.2", h1);
    let h2 = g.func("join", |xs, _| Ok((xs[0].tensor()?.tanh()? + xs[1].tensor()?)?.into()), [h2, h0]);
    let build = |vb: &Vb| {
        let (a, b) = (nn::linear(WIDTH, WIDTH, vb.pp("a"))?, nn::linear(WIDTH, WIDTH, vb.pp("b"))?);
        Ok(stage_op(move |xs, _| {
            let x = xs[0].tensor()?;
            Ok(vec![a.forward(x)?.into(), b.forward(x)?.into()])
        }))
    };
    let [a, b] = g.module_many("heads", build, [h2]);
    let gated = |xs: &[Value], _: &candle_pipe::Ctx| {
        let (a, b, mask) = (xs[0].tensor()?, xs[1].tensor()?, xs[2].tensor()?);
        Ok((a * mask.where_cond(b, &b.zeros_like()?)?)?.into())
    };
    let gate = g.func("gate", gated, [a, b, mask]);
    let h3 = layer(&mut g, "layers.3", gate);
    let scaled = |xs: &[Value], _: &candle_pipe::Ctx| {
        Ok((xs[0].tensor()? + (xs[1].tensor()? * xs[2].float()?)?)?.into())
    };
    let h3 = g.func("scaled", scaled, [h3, h0, scale]);
    let h4 = layer(&mut g, "layers.4", h3);
    let y = g.func("out", |xs, _| Ok((xs[0].tensor()? + xs[1].tensor()?)?.into()), [h4, h1]);
    g.output("y", y);
    g.output("a", a);
    let loss = |xs: &[Value], _: &candle_pipe::Ctx| {
        Ok((mse(xs[0].tensor()?, xs[1].tensor()?)? + xs[2].tensor()?.sqr()?.mean_all()?)?)
    };
    g.loss_fn(loss, [y, labels, a], LossReduction::Mean);
    g
}

pub(crate) fn plain_skips(vb: &Vb, args: &Args) -> Result<Plain> {
    let tensor = |value: &Value| value.tensor().unwrap().clone();
    let (x, labels, mask) =
        (tensor(&args.args[0]), tensor(&args.kwargs["labels"]), tensor(&args.kwargs["mask"]));
    let h0 = plain_linear(vb, "layers.0", &x)?;
    let h1 = plain_linear(vb, "layers.1", &h0)?;
    let h2 = (plain_linear(vb, "layers.2", &h1)?.tanh()? + &h0)?;
    let (a, b) = (plain_linear(vb, "heads.a", &h2)?, plain_linear(vb, "heads.b", &h2)?);
    let gate = (&a * mask.where_cond(&b, &b.zeros_like()?)?)?;
    let h3 = (plain_linear(vb, "layers.3", &gate)? + (&h0 * 0.5)?)?;
    let y = (plain_linear(vb, "layers.4", &h3)? + &h1)?;
    let loss = (mse(&y, &labels)? + a.sqr()?.mean_all()?)?;
    Ok((BTreeMap::from([("y".into(), y), ("a".into(), a)]), loss))
}

const WORDS: usize = 6;

pub(crate) fn tied_args(rows: usize) -> Args {
    let ids = |shift: usize| -> Value {
        let ids: Vec<u32> = (0..rows * 3).map(|i| ((i * 5 + shift) % WORDS) as u32).collect();
        Tensor::from_vec(ids, (rows, 3), &Device::Cpu).unwrap().into()
    };
    Args { args: vec![ids(0), ids(1)], ..Args::default() }
}

/// A weight that the first, a middle and the last layer use.
pub(crate) fn tied(share: Share) -> Builder {
    let mut g = Builder::new();
    let (ids, targets) = (g.input("ids", In::Arg), g.input("targets", In::Arg));
    let weight = g.parameter("tok.weight", share, |vb| Ok(vb.get((WORDS, WIDTH), "weight")?));
    let embed = |xs: &[Value], _: &candle_pipe::Ctx| {
        let (weight, ids) = (xs[0].tensor()?, xs[1].tensor()?);
        Ok(weight.index_select(&ids.flatten_all()?, 0)?.reshape((ids.dim(0)?, ids.dim(1)?, WIDTH))?.into())
    };
    let h = g.func("embed", embed, [weight, ids]);
    let h = layer(&mut g, "layers.0", h);
    let mean = |xs: &[Value], _: &candle_pipe::Ctx| {
        Ok(xs[0].tensor()?.tanh()?.broadcast_add(&xs[1].tensor()?.mean(0)?)?.into())
    };
    let h = g.func("shift", mean, [h, weight]);
    let h = layer(&mut g, "layers.1", h);
    let head = |xs: &[Value], _: &candle_pipe::Ctx| {
        Ok(nn::deferred_linear(xs[0].tensor()?, xs[1].tensor()?, None)?.into())
    };
    let logits = g.func("head", head, [h, weight]);
    g.output("logits", logits);
    let loss = |xs: &[Value], _: &candle_pipe::Ctx| {
        Ok(candle_nn::loss::cross_entropy(&xs[0].tensor()?.flatten_to(1)?, &xs[1].tensor()?.flatten_all()?)?)
    };
    g.loss_fn(loss, [logits, targets], LossReduction::Mean);
    g
}

pub(crate) fn plain_tied(vb: &Vb, args: &Args) -> Result<Plain> {
    let (ids, targets) = (args.args[0].tensor().unwrap(), args.args[1].tensor().unwrap());
    let weight = vb.pp("tok").get((WORDS, WIDTH), "weight")?;
    let h = weight.index_select(&ids.flatten_all()?, 0)?.reshape((ids.dim(0)?, ids.dim(1)?, WIDTH))?;
    let h = plain_linear(vb, "layers.0", &h)?.tanh()?.broadcast_add(&weight.mean(0)?)?;
    let h = plain_linear(vb, "layers.1", &h)?;
    let logits = h.broadcast_matmul(&weight.t()?)?;
    let loss = candle_nn::loss::cross_entropy(&logits.flatten_to(1)?, &targets.flatten_all()?)?;
    Ok((BTreeMap::from([("logits".into(), logits)]), loss))
}

/// Values of all kinds between layers: whole numbers, text, nothing, trees; the loss is a place in one.
pub(crate) fn kinds() -> Builder {
    let mut g = Builder::new();
    let x = g.input("x", In::Arg);
    let h = layer(&mut g, "layers.0", x);
    let tree = |xs: &[Value], _: &candle_pipe::Ctx| {
        let h = xs[0].tensor()?;
        let best = h.argmax(1)?;
        let parts = BTreeMap::from([("half", Value::from((h * 0.5)?)), ("best", best.into())]);
        Ok([Value::from((h, parts, ())), Value::from((3, "tanh", true))])
    };
    let [tree, plan] = g.func_many("tree", tree, [h]);
    let use_tree = |xs: &[Value], _: &candle_pipe::Ctx| {
        let (h, parts, plan) = (xs[0].at(0)?.tensor()?, xs[0].at(1)?, &xs[1]);
        let (half, best) = (parts.get("half")?.tensor()?, parts.get("best")?.tensor()?);
        let h = match plan.at(1)?.text()? {
            "tanh" if plan.at(2)?.bool()? => h.tanh()?,
            _ => h.clone(),
        };
        let best = (best.to_dtype(DType::F64)? * plan.at(0)?.int()? as f64)?;
        Ok((h + half)?.broadcast_add(&best.unsqueeze(1)?)?.into())
    };
    let h = g.func("use", use_tree, [tree, plan]);
    let y = layer(&mut g, "layers.1", h);
    let late = |xs: &[Value], _: &candle_pipe::Ctx| {
        let y = (xs[0].tensor()? + xs[1].at(1)?.get("half")?.tensor()?)?;
        let losses = BTreeMap::from([("main", Value::from(vec![y.sqr()?.mean_all()?]))]);
        Ok([y.into(), losses.into()])
    };
    let [y, losses] = g.func_many("late", late, [y, tree]);
    g.output("y", y);
    g.loss_at(losses, ".main[0]", LossReduction::Mean);
    g
}

pub(crate) fn kinds_args(rows: usize) -> Args {
    Args { args: vec![numbers("x", &[rows, WIDTH]).into()], ..Args::default() }
}

pub(crate) fn plain_kinds(vb: &Vb, args: &Args) -> Result<Plain> {
    let h = plain_linear(vb, "layers.0", args.args[0].tensor().unwrap())?;
    let best = (h.argmax(1)?.to_dtype(DType::F64)? * 3.0)?;
    let half = (&h * 0.5)?;
    let y = plain_linear(vb, "layers.1", &(h.tanh()? + &half)?.broadcast_add(&best.unsqueeze(1)?)?)?;
    let y = (y + half)?;
    let loss = y.sqr()?.mean_all()?;
    Ok((BTreeMap::from([("y".into(), y)]), loss))
}

/// A residual block of two layers, which a model can be cut between.
pub(crate) struct Block;

impl PipeModule<Vb> for Block {
    fn build(&self, g: &mut PipeBuilder<Vb>, inputs: &[ValueId]) -> Vec<ValueId> {
        let up = layer(g, "up", inputs[0]);
        let act = g.func("act", |xs, _| Ok(xs[0].tensor()?.tanh()?.into()), [up]);
        let down = layer(g, "down", act);
        vec![g.func("add", |xs, _| Ok((xs[0].tensor()? + xs[1].tensor()?)?.into()), [down, inputs[0]])]
    }
}

pub(crate) fn blocks(count: usize) -> Builder {
    let mut g = Builder::new();
    let mut h = g.input("x", In::Arg);
    for i in 0..count {
        h = g.nested(&format!("blocks.{i}"), &Block, [h])[0];
    }
    g.output("y", h);
    g.loss_fn(|xs, _| Ok(xs[0].tensor()?.sqr()?.sum_all()?), [h], LossReduction::Sum);
    g
}

pub(crate) fn plain_blocks(count: usize) -> impl Fn(&Vb, &Args) -> Result<Plain> {
    move |vb, args| {
        let mut h = args.args[0].tensor().unwrap().clone();
        for i in 0..count {
            let up = plain_linear(vb, &format!("blocks.{i}.up"), &h)?.tanh()?;
            h = (plain_linear(vb, &format!("blocks.{i}.down"), &up)? + h)?;
        }
        let loss = h.sqr()?.sum_all()?;
        Ok((BTreeMap::from([("y".into(), h.i(..)?)]), loss))
    }
}
