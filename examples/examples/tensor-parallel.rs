//! Tensor parallelism: a plan shards one layer by columns and the next by rows, which costs one all_reduce.

use anyhow::{Context, Result, ensure};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{Op, RankContext, World, comm};
use candle_nn::{Linear as Plain, Module};
use candle_shard::nn::{Linear, Parameter, Parameters, ShardedVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{DTensor, Replicate};

const RANKS: usize = 2;

/// A loss, and the gradients of weights and biases in the order of the layers.
type Made = (f64, Vec<Tensor>);

/// Runs the same model in candle's layers, with the parameters of the sharded one.
fn on_one_device(parameters: &Parameters, x: &Tensor) -> Result<Made> {
    let whole = |p: &Parameter| Ok(Var::from_tensor(&p.tensor.full_tensor()?.detach())?);
    let vars = parameters.iter().map(whole).collect::<Result<Vec<_>>>()?;
    let layer = |i: usize| Plain::new(vars[i].as_tensor().clone(), Some(vars[i + 1].as_tensor().clone()));
    let loss = layer(2).forward(&layer(0).forward(x)?.tanh()?)?.sqr()?.mean_all()?;
    let grads = loss.backward()?;
    let grads = vars.iter().map(|var| grads.get(var).cloned().context("every parameter has a gradient"));
    Ok((loss.to_scalar()?, grads.collect::<Result<_>>()?))
}

fn on_ranks(ctx: &RankContext, x: &Tensor) -> Result<[Made; 2]> {
    let mesh = ctx.mesh(&[("tp", RANKS)])?;
    let plan = Plan::new("tp").with("up", ColwiseParallel::default()).with("down", RowwiseParallel::default());
    let vb = ShardedVarBuilder::fresh(42, &mesh, plan, DType::F64, &Device::Cpu)?;
    let (up, down) = (Linear::new(16, 64, true, &vb.pp("up"))?, Linear::new(64, 16, true, &vb.pp("down"))?);
    let parameters = vb.finish()?;

    let everywhere = DTensor::distribute(x, &mesh, &[Replicate])?;
    let (y, forward) = comm::record(|| down.forward(&up.forward(&everywhere)?.tanh()?));
    let loss = y?.sqr()?.mean_all()?;
    let (grads, backward) = comm::record(|| parameters.backward(&loss));
    let grads = grads?;
    if ctx.rank() == 0 {
        for p in parameters.iter() {
            println!("{:12} {:24} {:?} on a rank", p.name, p.tensor.spec().to_string(), p.var.dims());
        }
        println!("forward:  {forward}\nbackward: {backward}");
    }
    ensure!(forward.total() == 1 && forward.get(Op::AllReduce).count == 1, "one all_reduce, not {forward}");
    // The gradient of `x` would cost another all_reduce; nothing needs it.
    ensure!(backward.total() == 0, "nothing in the backward pass, not {backward}");

    let whole =
        |p: &Parameter| p.grad(&grads)?.context("every parameter has a gradient")?.full_tensor().map_err(Into::into);
    let got = (loss.to_scalar()?, parameters.iter().map(whole).collect::<Result<_>>()?);
    Ok([got, on_one_device(&parameters, x)?])
}

fn main() -> Result<()> {
    let normal = Distribution::Normal { mean: 0.0, stdev: 1.0 };
    let x = sample_full(Stream::new(1, "x"), normal, &[8, 16], DType::F64, &Device::Cpu)?;
    for [(loss, grads), (want_loss, want)] in World::local(RANKS).run(|ctx| on_ranks(ctx, &x))? {
        ensure!((loss - want_loss).abs() < 1e-12, "loss {loss}, one device {want_loss}");
        for (got, want) in grads.iter().zip(&want) {
            let off = (got - want)?.abs()?.max_all()?.to_scalar::<f64>()?;
            ensure!(off < 1e-12, "a gradient is off by {off:e}");
        }
    }
    println!("the loss and all gradients are those of one device");
    Ok(())
}
