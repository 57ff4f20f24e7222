//! Four ranks write a checkpoint. Two ranks with another layout, and one rank, continue from it with equal losses.

use std::path::Path;

use anyhow::{Result, ensure};
use candle_core::{DType, Device};
use candle_dist::World;
use candle_nn::ParamsAdamW;
use candle_shard::nn::{AdamW, Linear, MeshVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{DTensor, Replicate, checkpoint};

/// Steps before the checkpoint, and as many after it.
const STEPS: usize = 3;

/// The action of a run at half time.
#[derive(Clone, Copy, PartialEq)]
enum Half {
    /// It saves a checkpoint and continues.
    Save,
    /// It starts here, with the state of another run.
    Load,
}

/// Returns the losses of the steps after the checkpoint at `path`, for this number of ranks and this plan.
fn train(ranks: usize, plan: &Plan, path: &Path, half: Half) -> Result<Vec<f64>> {
    let losses = World::threads(ranks).run(|ctx| -> Result<Vec<f64>> {
        let mesh = ctx.mesh(&[("tp", ranks)])?;
        // A run that loads starts with other numbers, so a parameter that is not loaded changes the losses.
        let seed = if half == Half::Load { 2 } else { 1 };
        let vb = MeshVarBuilder::fresh(seed, &mesh, plan.clone(), DType::F64, &Device::Cpu)?;
        let (up, down) = (Linear::new(6, 18, true, &vb.pp("up"))?, Linear::new(18, 6, true, &vb.pp("down"))?);
        let parameters = vb.finish()?;
        let mut optimizer = AdamW::new(&parameters, ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() })?;

        let normal = Distribution::Normal { mean: 0.0, stdev: 1.0 };
        let x = sample_full(Stream::new(3, "x"), normal, &[10, 6], DType::F64, &Device::Cpu)?;
        let x = DTensor::distribute(&x, &mesh, &[Replicate])?;
        let step = |optimizer: &mut AdamW| -> Result<f64> {
            let loss = down.forward(&up.forward(&x)?.gelu()?)?.sub(&x)?.sqr()?.mean_all()?;
            optimizer.step(&parameters.backward(&loss)?)?;
            Ok(loss.to_scalar()?)
        };
        match half {
            Half::Save => {
                (0..STEPS).try_for_each(|_| step(&mut optimizer).map(drop))?;
                checkpoint::save(path, &mesh, &[parameters.named_tensors(), optimizer.state()?].concat())?;
            }
            Half::Load => {
                parameters.load(path)?;
                optimizer.load(path)?;
            }
        }
        if ctx.rank() == 0 {
            let held = parameters.local_elem_count();
            println!("world of {ranks}: {held} of {} elements on rank 0", parameters.elem_count());
            println!("  up.weight {}", up.weight().spec());
        }
        (0..STEPS).map(|_| step(&mut optimizer)).collect()
    })?;
    ensure!(losses.iter().all(|rank| *rank == losses[0]), "ranks have different losses: {losses:?}");
    println!("  losses {:.6?}", losses[0]);
    Ok(losses[0].clone())
}

fn run(path: &Path) -> Result<()> {
    let colwise = Plan::new("tp").with("up", ColwiseParallel::default()).with("down", RowwiseParallel::default());
    let rowwise = Plan::new("tp")
        .with("up", RowwiseParallel::default())
        .with("down", ColwiseParallel::default().output(Replicate));
    let want = train(4, &colwise, path, Half::Save)?;
    for (ranks, plan) in [(2, &rowwise), (1, &Plan::new("tp"))] {
        for (got, want) in train(ranks, plan, path, Half::Load)?.iter().zip(&want) {
            ensure!((got - want).abs() < 1e-12, "loss {got} in a world of {ranks}, {want} in the first");
        }
    }
    println!("the losses went on as they would have");
    Ok(())
}

fn main() -> Result<()> {
    let path = std::env::temp_dir().join(format!("checkpoint-example-{}", std::process::id()));
    let done = run(&path);
    std::fs::remove_dir_all(path).ok();
    done
}
