//! Data parallelism: each of two ranks has the whole model and half of the batch. Training equals that of one device.

use anyhow::{Result, ensure};
use candle_core::backprop::GradStore;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{DataParallel, DataParallelOptions, World, comm};
use candle_nn::{AdamW, Linear, Module, Optimizer, ParamsAdamW};
use candle_shard::random::{Distribution, Stream, sample_full};

const RANKS: usize = 2;
const ROWS: usize = 16;
const STEPS: usize = 30;

/// A perceptron of two layers.
struct Mlp {
    layers: [Linear; 2],
    vars: Vec<(String, Var)>,
}

/// Returns normal numbers that depend on a seed and a name only.
fn numbers(seed: u64, name: &str, dims: &[usize]) -> Result<Tensor> {
    let normal = Distribution::Normal { mean: 0.0, stdev: 0.5 };
    Ok(sample_full(Stream::new(seed, name), normal, dims, DType::F64, &Device::Cpu)?)
}

impl Mlp {
    fn new(seed: u64) -> Result<Self> {
        let var = |name: &str, dims: &[usize]| -> Result<Var> { Ok(Var::from_tensor(&numbers(seed, name, dims)?)?) };
        let (up, up_bias) = (var("up.weight", &[32, 4])?, var("up.bias", &[32])?);
        let (down, down_bias) = (var("down.weight", &[1, 32])?, var("down.bias", &[1])?);
        let layer = |weight: &Var, bias: &Var| Linear::new(weight.as_tensor().clone(), Some(bias.as_tensor().clone()));
        let layers = [layer(&up, &up_bias), layer(&down, &down_bias)];
        let named = [("up.weight", up), ("up.bias", up_bias), ("down.weight", down), ("down.bias", down_bias)];
        Ok(Self { layers, vars: named.map(|(name, var)| (name.to_string(), var)).to_vec() })
    }

    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.layers[1].forward(&self.layers[0].forward(x)?.tanh()?)
    }

    /// Returns the losses of all steps. `average` changes the gradients before they are used.
    fn train(&self, x: &Tensor, y: &Tensor, average: impl Fn(&mut GradStore) -> Result<()>) -> Result<Vec<f64>> {
        let vars = self.vars.iter().map(|(_, var)| var.clone()).collect();
        let mut optimizer = AdamW::new(vars, ParamsAdamW { lr: 0.02, ..ParamsAdamW::default() })?;
        let mut step = || -> Result<f64> {
            let loss = candle_nn::loss::mse(&self.forward(x)?, y)?;
            let mut grads = loss.backward()?;
            average(&mut grads)?;
            optimizer.step(&grads)?;
            Ok(loss.to_scalar()?)
        };
        (0..STEPS).map(|_| step()).collect()
    }
}

fn main() -> Result<()> {
    let x = numbers(1, "x", &[ROWS, 4])?;
    let y = x.sqr()?.sum_keepdim(1)?;

    let alone = Mlp::new(42)?;
    let want = alone.train(&x, &y, |_| Ok(()))?;

    let ranks = World::threads(RANKS).run(|ctx| -> Result<_> {
        // Each rank starts with other numbers; `DataParallel` broadcasts those of rank 0.
        let model = Mlp::new(42 + ctx.rank() as u64)?;
        let dp = DataParallel::new(ctx.group(), &model.vars, &DataParallelOptions::default())?;
        let part = |t: &Tensor| t.narrow(0, ctx.rank() * ROWS / RANKS, ROWS / RANKS);
        let (x, y) = (part(&x)?, part(&y)?);
        let (losses, counts) = comm::record(|| model.train(&x, &y, |grads| Ok(dp.reduce(grads)?)));
        Ok((losses?, model.vars, counts))
    })?;

    for step in (0..STEPS).step_by(10).chain([STEPS - 1]) {
        let loss = ranks.iter().map(|(losses, ..)| losses[step]).sum::<f64>() / RANKS as f64;
        println!("step {step:2}: loss {loss:.6} on {RANKS} ranks, {:.6} on one device", want[step]);
        ensure!((loss - want[step]).abs() < 1e-9, "the losses of step {step} differ");
    }
    for (_, vars, _) in &ranks {
        for ((name, got), (_, want)) in vars.iter().zip(&alone.vars) {
            let off = (got.as_tensor() - want.as_tensor())?.abs()?.max_all()?.to_scalar::<f64>()?;
            ensure!(off < 1e-9, "{name} is off by {off:e}");
        }
    }
    println!("the trained parameters are those of one device; a rank made {}", ranks[0].2);
    Ok(())
}
