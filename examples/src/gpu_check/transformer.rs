//! Compares the toy Transformer on GPU ranks with one host rank.

use anyhow::{Result, ensure};
use candle_core::{DType, Device, Tensor};
use candle_dist::{RankContext, World, round_grads};
use candle_nn::{Optimizer, SGD};
use candle_shard::nn::{MeshVarBuilder, Mode};
use candle_shard::{DTensor, Replicate};
use test_utils::model_args::ModelArgs;
use test_utils::toy::Transformer;

use super::Ranks;

const STEPS: u64 = 8;

pub(super) fn check_f32(ranks: &Ranks) -> Result<String> {
    check(ranks, DType::F32, 1e-4)
}

pub(super) fn check_bf16(ranks: &Ranks) -> Result<String> {
    check(ranks, DType::BF16, 5e-2)
}

/// Trains on one rank of the device, which loads the kernels that training needs.
pub(super) fn warm_up(device: &Device) -> Result<()> {
    for dtype in [DType::F32, DType::BF16] {
        World::threads(1).devices(std::slice::from_ref(device)).run(|ctx| train(ctx, dtype))?;
    }
    Ok(())
}

/// Compares the losses of training in `dtype` with those of f32 on the host.
fn check(ranks: &Ranks, dtype: DType, tolerance: f64) -> Result<String> {
    let expected = World::threads(1).run(|ctx| train(ctx, DType::F32))?.concat();
    let found = ranks.run(|ctx| Ok(train(ctx, dtype)?))?;
    let mut largest = 0f64;
    for losses in &found {
        ensure!(losses == &found[0], "ranks differ: {losses:?} and {:?}", found[0]);
        for (loss, expected) in losses.iter().zip(&expected) {
            let error = (loss - expected).abs() / expected.abs();
            ensure!(
                error <= tolerance,
                "losses {losses:?}, on the host {expected:?} in f32: off by {error:.1e}"
            );
            largest = largest.max(error);
        }
    }
    Ok(format!("{STEPS} losses within {largest:.1e} of the host's, {tolerance:.0e} allowed"))
}

/// Returns the losses of a few steps, tensor and sequence-parallel over all ranks.
fn train(ctx: &RankContext, dtype: DType) -> candle_shard::Result<Vec<f64>> {
    let args = ModelArgs { vocab_size: 64, dim: 64, n_heads: 8, dropout_p: 0.1, ..ModelArgs::default() };
    let (mesh, device) = (ctx.mesh(&[("tp", ctx.world_size())])?, ctx.device());
    let vb = MeshVarBuilder::fresh(7, &mesh, Transformer::plan("tp", true), dtype, device)?;
    let model = Transformer::new(&args, &vb)?;
    let parameters = vb.finish()?;
    let mut optimizer = SGD::new(parameters.vars(), 0.1)?;
    let ids = |offset: u32| -> candle_core::Result<Tensor> {
        let ids: Vec<u32> = (0..64).map(|i| (i * 5 + offset) % 64).collect();
        Tensor::from_vec(ids, (4, 16), device)
    };
    let everywhere = |tensor: Tensor| DTensor::distribute(&tensor, &mesh, &[Replicate]);
    let mut losses = Vec::new();
    for step in 0..STEPS {
        let logits = model.forward(&everywhere(ids(0)?)?, Mode::Train { step })?;
        let loss = logits.cross_entropy(&everywhere(ids(5)?)?)?;
        let mut grads = parameters.backward(&loss)?;
        // Sums of 16-bit gradients are f32, and candle's optimizer requires the variable's dtype.
        round_grads(&mut grads, &parameters.vars())?;
        optimizer.step(&grads)?;
        losses.push(loss.full_tensor()?.to_dtype(DType::F64)?.to_scalar()?);
    }
    Ok(losses)
}
