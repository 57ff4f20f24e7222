//! Whole trainings, on every mesh and in every way.
use crate::fsdp::harness::*;
use candle_core::{DType, Device};
use candle_nn::ParamsAdamW;
use candle_shard::Result;
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{AdamW, Linear, MeshVarBuilder};
use std::path::Path;
use test_utils::{Scratch, has_ranks, world};

#[test]
fn training_equals_one_device_on_every_mesh() {
    let case = Case { clip: Some(0.1), ..Case::default() };
    let meshes: [&[(&str, usize)]; 8] = [
        &[("dp", 1), ("tp", 2)],
        &[("dp", 2), ("tp", 1)],
        &[("dp", 3), ("tp", 1)],
        &[("dp", 4), ("tp", 1)],
        &[("dp", 5), ("tp", 1)],
        &[("dp", 2), ("tp", 2)],
        &[("tp", 2), ("dp", 2)],
        &[("tp", 2), ("dp", 3)],
    ];
    compare(&meshes, case, 1e-9);
}

#[test]
fn every_way_to_gather_gives_the_same() {
    let meshes: [&[(&str, usize)]; 3] =
        [&[("dp", 2), ("tp", 1)], &[("dp", 3), ("tp", 2)], &[("tp", 2), ("dp", 2)]];
    for bits in 0..4 {
        let (reshard_after_forward, prefetch) = (bits & 1 != 0, bits & 2 != 0);
        for recompute in [None, Some(Recompute::Within), Some(Recompute::Around)] {
            for shared in [false, true] {
                let options = FullyShardOptions::default()
                    .reshard_after_forward(reshard_after_forward)
                    .prefetch(prefetch);
                compare(&meshes, Case { options, recompute, shared, clip: None }, 1e-9);
            }
        }
    }
}

#[test]
fn pieces_in_32_bits_are_computed_in_16() {
    let run = |ranks: usize, reduce_dtype: Option<DType>| {
        world(ranks)
            .run(|ctx| -> Result<(f64, Vec<f64>)> {
                let options =
                    FullyShardOptions::default().param_dtype(DType::BF16).reduce_dtype(reduce_dtype);
                let mesh = ctx.mesh(&[("dp", ctx.world_size()), ("tp", 1)])?;
                let vb = builder(&mesh, DType::F32, options)?;
                let layer = FullyShard::new(&vb.pp("layer"), |vb| Linear::new(5, 3, true, vb))?;
                let parameters = vb.finish()?;
                assert!(parameters.iter().all(|p| p.var.dtype() == DType::F32));
                let mut optimizer =
                    AdamW::new(&parameters, ParamsAdamW { lr: 0.01, ..ParamsAdamW::default() })?;
                let x = rows(&batch(0)?.to_dtype(DType::BF16)?, &mesh)?;
                let mut loss = 0.0;
                for _ in 0..20 {
                    let y = layer.run(|layer| layer.forward(&x))?;
                    assert_eq!(y.dtype(), DType::BF16);
                    let y = y.to_dtype(DType::F32)?.sqr()?.mean_all()?;
                    optimizer.step(&parameters.backward(&y)?)?;
                    loss = f64::from(y.to_scalar::<f32>()?);
                }
                Ok((loss, whole(&parameters.iter().next().unwrap().tensor)?))
            })
            .unwrap()
            .remove(0)
    };
    let alone = run(1, None);
    for (ranks, reduce_dtype) in [(2, None), (2, Some(DType::F32)), (3, Some(DType::F32))] {
        if !has_ranks(ranks) {
            continue;
        }
        let (loss, weight) = run(ranks, reduce_dtype);
        assert_close(&[loss], &[alone.0], 0.02, "loss");
        assert_close(&weight, &alone.1, 0.02, "weight");
    }
    // Steps below what 16 bits can tell apart add up in what is held.
    let coarse = |x: &f64| f64::from(half::bf16::from_f64(*x)) == *x;
    assert!(!alone.1.iter().all(coarse));
}

#[test]
fn training_goes_on_from_a_checkpoint_on_any_other_mesh() {
    let meshes: [&[(&str, usize)]; 4] =
        [&[("dp", 1), ("tp", 1)], &[("dp", 4), ("tp", 1)], &[("dp", 1), ("tp", 2)], &[("dp", 2), ("tp", 2)]];
    if !has_ranks(4) {
        return;
    }
    let dir = Scratch::of_ranks("fsdp-checkpoint");
    let run = |axes: &[(&str, usize)], from: Option<&Path>, to: Option<&Path>| {
        let ranks = axes.iter().map(|(_, size)| size).product();
        let losses = world(ranks).run(|ctx| -> Result<Vec<f64>> {
            let mesh = ctx.mesh(axes)?;
            let vb = MeshVarBuilder::fresh(7, &mesh, Model::plan(), DType::F64, ctx.device())?;
            let vb = vb.fully_shard("dp", FullyShardOptions::default())?;
            let model = Model::new(&vb)?;
            let parameters = vb.finish()?;
            let mut optimizer = AdamW::new(&parameters, ParamsAdamW { lr: 0.05, ..ParamsAdamW::default() })?;
            if let Some(from) = from {
                parameters.load(from)?;
                optimizer.load(from)?;
            }
            let mut losses = Vec::new();
            for step in 0..3 {
                let loss = model.loss(&rows(&batch(step)?, &mesh)?, Case::default())?;
                optimizer.step(&parameters.backward(&loss)?)?;
                losses.push(loss.to_scalar::<f64>()?);
            }
            if let Some(to) = to {
                let state = [parameters.named_tensors(), optimizer.state()?].concat();
                candle_shard::checkpoint::save(to, &mesh, &state)?;
            }
            Ok(losses)
        });
        losses.unwrap().remove(0)
    };
    let saved = dir.path("alone");
    run(meshes[0], None, Some(&saved));
    let want = run(meshes[0], Some(&saved), None);
    for (i, axes) in meshes.into_iter().enumerate() {
        let path = dir.path(i.to_string());
        run(axes, None, Some(&path));
        for onto in meshes {
            assert_close(&run(onto, Some(&path), None), &want, 1e-9, &format!("from {axes:?} onto {onto:?}"));
        }
    }
}

#[test]
fn gradients_of_16_bits_add_up_in_32_over_ranks_and_segments() {
    use candle_core::Tensor;
    use candle_shard::nn::recompute;
    use std::sync::Arc;
    const RANKS: usize = 4;
    const SEGMENTS: usize = 4;
    if !has_ranks(RANKS) {
        return;
    }
    // The gradient is 1 of the first rank, and of each other what 16 bits lose beside that.
    let small = 1.0 / 256.0;
    let want = 1.0 + (RANKS - 1) as f64 * small;
    for (reduce_dtype, recomputes) in [(None, false), (None, true), (Some(DType::BF16), false)] {
        let run = world(RANKS).run(|ctx| -> Result<(DType, f64)> {
            let options = FullyShardOptions::default().reduce_dtype(reduce_dtype);
            let mesh = ctx.mesh(&[("dp", RANKS), ("tp", 1)])?;
            let vb = builder(&mesh, DType::BF16, options)?;
            let unit = FullyShard::new(&vb.pp("layer"), |vb| Ok(Arc::new(Linear::new(1, 4, false, vb)?)))?;
            let parameters = vb.finish()?;
            let column: Vec<f64> = (0..RANKS).map(|rank| if rank == 0 { 1.0 } else { small }).collect();
            let x = Tensor::from_vec(column, (RANKS, 1), &Device::Cpu)?.to_dtype(DType::BF16)?;
            let x = rows(&x, &mesh)?;
            let (x, _) = x.to_var()?; // recomputed parts want an input with a gradient
            let y = unit.run(|layer| {
                let part = |scale: f64| -> Result<candle_shard::DTensor> {
                    let layer = layer.clone();
                    recompute(&x, move |x| layer.forward(x)?.affine(scale, 0.0))
                };
                match recomputes {
                    false => layer.forward(&x),
                    // 1, 1/256, 1/512 and 1/1024 of the gradient, of which 16 bits would keep the first.
                    true => (1..SEGMENTS)
                        .try_fold(part(1.0)?, |sum, i| sum.add(&part(0.5f64.powi(7 + i as i32))?)),
                }
            })?;
            let grads = parameters.backward(&y.sum_all()?)?;
            let p = parameters.iter().next().unwrap();
            Ok((grads.get(&p.var).map_or(DType::U8, Tensor::dtype), whole(&p.grad(&grads)?.unwrap())?[0]))
        });
        let segments = if recomputes { 1.0 + 1.0 / 256.0 + 1.0 / 512.0 + 1.0 / 1024.0 } else { 1.0 };
        for (dtype, got) in run.unwrap() {
            assert_eq!(dtype, DType::F32);
            let error = (got / (want * segments) - 1.0).abs();
            println!("reduced in {reduce_dtype:?}, recomputed {recomputes}: {error:e}");
            assert!(
                error < if reduce_dtype.is_none() { 1e-6 } else { 5e-3 },
                "{got} for {}",
                want * segments
            );
        }
    }
}
