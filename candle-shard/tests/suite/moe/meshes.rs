//! Experts with other axes: tensor, data, fully sharded and sequence parallelism.
use super::harness::{Routing, TRAIN, build, config, errors, tokens, truth};
use candle_core::{DType, Tensor};
use candle_shard::fsdp::{FullyShard, FullyShardOptions};
use candle_shard::nn::{MeshVarBuilder, MoE, Mode, recompute};
use candle_shard::parallel::Plan;
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use std::collections::BTreeMap;
use test_utils::{block, distance, on_ranks};

/// The names and sizes of two axes.
type Axes = [(&'static str, usize); 2];

#[test]
fn data_expert_and_tensor_axes_equal_one_device() {
    for (dp, ep, tp) in [(2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 3, 2), (2, 2, 2), (1, 1, 4)] {
        on_ranks(dp * ep * tp, "axes", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("dp", dp), ("ep", ep), ("tp", tp)])?;
            let full = config(5, 2).tensor_axis("tp").shared_hidden(3).balance_weight(0.2).z_weight(0.1);
            let gated = full.clone().shared_gate(true).logit_bias(true).expert_bias(true);
            for config in [full.clone(), gated, full.capacity_factor(0.6)] {
                let truth = truth(&config, &[3, 4, 6], Routing::Random, DType::F64)?;
                for at in [
                    [Shard(0), Shard(0), Replicate],
                    [Shard(0), Shard(1), Replicate],
                    [Shard(1), Replicate, Replicate],
                    [Shard(0), Shard(0), Shard(1)], // sequence parallel: tokens are gathered over tp and cut again
                    [Replicate, Shard(1), Shard(2)],
                ] {
                    let spec = tokens(&mesh, &truth, &at, None)?;
                    let (error, _) = errors(&config, &truth, spec)?;
                    assert!(error < 1e-12, "{dp} × {ep} × {tp}, {at:?}: {error:e}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn partial_tokens_are_summed_first() {
    on_ranks(2, "partial", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 2)])?;
        let config = config(4, 2);
        let truth = truth(&config, &[5, 6], Routing::Random, DType::F64)?;
        let (layer, _) = build(&config, &mesh, &truth)?;
        let x =
            test_utils::distribute(&truth.x, &mesh, &[Replicate])?.redistribute(&[Placement::PARTIAL_SUM])?;
        let made = layer.forward(&x, TRAIN)?;
        assert_eq!(made.output.placements(), [Replicate]);
        assert!(distance(made.output.to_local(), &truth.made.output) < 1e-12);
        Ok(())
    });
}

#[test]
fn fully_sharded_experts_equal_one_device() {
    let cases: [(Axes, Option<Vec<usize>>); 6] = [
        ([("fsdp", 2), ("ep", 2)], None),
        ([("fsdp", 2), ("ep", 1)], None),
        ([("fsdp", 3), ("ep", 1)], None),
        ([("fsdp", 1), ("ep", 2)], None),
        ([("fsdp", 2), ("ep", 2)], Some(vec![1, 4])),
        ([("ep", 2), ("fsdp", 2)], Some(vec![4, 1])),
    ];
    for (axes, sizes) in cases {
        on_ranks(axes[0].1 * axes[1].1, "fsdp", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&axes)?;
            let config = config(5, 2).shared_hidden(3).shared_gate(true).logit_bias(true).expert_bias(true);
            let config = config.expert_sizes(sizes.clone());
            let truth = truth(&config, &[7, 6], Routing::Random, DType::F64)?;
            let vb = MeshVarBuilder::fresh(3, &mesh, Plan::new("ep"), DType::F64, &test_utils::device())?;
            let vb = vb.fully_shard("fsdp", FullyShardOptions::default())?;
            let unit = FullyShard::new(&vb, |vb| MoE::new(config.clone(), vb))?;
            let parameters = vb.finish()?;
            let x = test_utils::distribute(&truth.x, &mesh, &[Shard(0), Shard(0)])?;
            let output = unit.run(|layer| Ok(layer.forward(&x, TRAIN)?.output))?;
            assert!(distance(&output.full_tensor()?, &truth.made.output) < 1e-12);
            let up = test_utils::distribute(&truth.up, &mesh, &[Replicate, Replicate])?;
            let grads = parameters.backward(&output.mul(&up)?.sum_all()?)?;
            for parameter in parameters.iter() {
                let got = parameter.grad(&grads)?.unwrap().full_tensor()?;
                let error = distance(&got, &truth.grads[&parameter.name]);
                assert!(error < 1e-12, "{} on {axes:?}, {sizes:?}: {error:e}", parameter.name);
            }
            Ok(())
        });
    }
}

#[test]
fn recomputed_experts_equal_one_device_and_count_choices_once() {
    on_ranks(3, "recompute", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 3)])?;
        let config = config(5, 2).bias(true);
        let truth = truth(&config, &[7, 6], Routing::Random, DType::F64)?;
        let (layer, parameters) = build(&config, &mesh, &truth)?;
        let (x, var) = test_utils::distribute(&truth.x, &mesh, &[Shard(0)])?.to_var()?;
        let segment = layer.clone();
        let output = recompute(&x, move |x| Ok(segment.forward(x, TRAIN)?.output))?;
        let up = test_utils::distribute(&truth.up, &mesh, &[Replicate])?;
        let grads = parameters.backward(&output.mul(&up)?.sum_all()?)?;
        for parameter in parameters.iter().filter(|p| !p.is_frozen()) {
            let got = parameter.grad(&grads)?.unwrap().full_tensor()?;
            let error = distance(&got, &truth.grads[&parameter.name]);
            assert!(error < 1e-12, "{}: {error:e}", parameter.name);
        }
        assert!(distance(grads.get(&var).unwrap(), &block(&truth.of_x, x.spec())?) < 1e-12);
        // A second batch, with which the signs would differ if the first one had been counted twice.
        let mean = 2.0 * 14.0 / 5.0;
        let signs = |counts: &[usize], times: usize| -> Vec<f64> {
            let sums = counts.iter().zip(&truth.made.counts).map(|(a, b)| a + times * b);
            sums.map(|sum| ((1 + times) as f64 / 2.0 * mean - sum as f64).signum()).collect()
        };
        let mut shows = false;
        for seed in 0..50 {
            let more =
                test_utils::distribute(&test_utils::values(&[7, 6], seed, DType::F64), &mesh, &[Shard(0)])?;
            let counts = layer.forward(&more, Mode::Eval)?.load.experts;
            if signs(&counts, 1) != signs(&counts, 2) {
                layer.forward(&more, TRAIN)?;
                layer.update_bias(1.0, None)?;
                let bias = parameters.iter().find(|p| p.name == "router.bias").unwrap();
                assert_eq!(bias.var.to_vec1::<f64>()?, signs(&counts, 1));
                shows = true;
                break;
            }
        }
        assert!(shows, "no batch would show the fault");
        Ok(())
    });
}

#[test]
fn tokens_in_any_memory_equal_one_device() {
    on_ranks(3, "strided", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 3)])?;
        let config = config(5, 2);
        let truth = truth(&config, &[4, 3, 6], Routing::Random, DType::F64)?;
        let (layer, _) = build(&config, &mesh, &truth)?;
        for at in [Shard(0), Shard(1), Replicate] {
            let spec = tokens(&mesh, &truth, &[at], None)?;
            let turned = block(&truth.x, &spec)?.transpose(0, 2)?.force_contiguous()?;
            let turned = turned.to_device(&test_utils::device())?.transpose(0, 2)?;
            assert!(at != Replicate || !turned.is_contiguous());
            let x = DTensor::from_local_with_spec(turned, spec)?;
            let made = layer.forward(&x, TRAIN)?;
            assert!(distance(&made.output.full_tensor()?, &truth.made.output) < 1e-12);
        }
        Ok(())
    });
}

#[test]
fn a_step_with_clipping_equals_one_device() {
    let steps = |world: usize| -> Vec<BTreeMap<String, Vec<f64>>> {
        on_ranks(world, "step", move |ctx| -> Result<_> {
            use candle_nn::Optimizer;
            let mesh = ctx.mesh(&[("ep", world)])?;
            let config = config(5, 2).balance_weight(0.1).shared_hidden(3);
            let truth = truth(&config, &[7, 6], Routing::Random, DType::F64)?;
            let (layer, parameters) = build(&config, &mesh, &truth)?;
            let mut optimizer = candle_nn::SGD::new(parameters.vars(), 0.1)?;
            for _ in 0..3 {
                let x = test_utils::distribute(&truth.x, &mesh, &[Shard(0)])?;
                let made = layer.forward(&x, TRAIN)?;
                let loss = made.output.sqr()?.sum_all()?.add(made.loss.unwrap())?;
                let mut grads = parameters.backward(&loss)?;
                parameters.clip_grad_norm(0.5)?.clip(&parameters.named_vars(), &mut grads)?;
                optimizer.step(&grads)?;
            }
            let whole = |p: &candle_shard::nn::Parameter| -> Result<_> {
                let list = p.tensor.full_tensor()?.flatten_all()?.to_vec1::<f64>()?;
                Ok((p.name.clone(), list))
            };
            parameters.iter().map(whole).collect::<Result<_>>()
        })
    };
    let one = steps(1).remove(0);
    for world in [2, 3, 4] {
        for made in steps(world) {
            for (name, want) in &one {
                let error = made[name].iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(error < 1e-12, "{name} on {world}: {error:e}");
            }
        }
    }
}

#[test]
fn sixteen_bit_experts_are_close_to_one_device() {
    on_ranks(3, "bf16", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 3)])?;
        let config = config(5, 2).bias(true).shared_hidden(4).shared_gate(true).expert_bias(true);
        let whole = truth(&config, &[8, 6], Routing::OneSided, DType::F32)?;
        let vb = MeshVarBuilder::fresh(3, &mesh, Plan::new("ep"), DType::BF16, &test_utils::device())?;
        let layer = MoE::new(config, &vb)?;
        let parameters = vb.finish()?;
        for parameter in parameters.iter().filter(|p| p.name == "router.weight") {
            parameter.var.set(&whole.weight.to_dtype(DType::BF16)?.to_device(&test_utils::device())?)?;
        }
        let x = test_utils::distribute(&whole.x.to_dtype(DType::BF16)?, &mesh, &[Shard(0)])?;
        let made = layer.forward(&x, TRAIN)?;
        assert_eq!(made.output.dtype(), DType::BF16);
        let close = |got: &Tensor, want: &Tensor| -> Result<f64> {
            let off = (got.to_dtype(DType::F32)?.to_device(want.device())? - want)?
                .abs()?
                .max_all()?
                .to_scalar::<f32>()?;
            Ok(f64::from(off / want.abs()?.max_all()?.to_scalar::<f32>()?))
        };
        assert!(close(&made.output.full_tensor()?, &whole.made.output)? < 0.03);
        let up = test_utils::distribute(&whole.up.to_dtype(DType::BF16)?, &mesh, &[Replicate])?;
        let grads = parameters.backward(&made.output.mul(&up)?.sum_all()?)?;
        for parameter in
            parameters.iter().filter(|p| p.name.starts_with("experts") || p.name.starts_with("shared"))
        {
            let got = parameter.grad(&grads)?.unwrap().full_tensor()?;
            let error = close(&got, &whole.grads[&parameter.name])?;
            assert!(error < 0.05, "{}: {error}", parameter.name);
        }
        Ok(())
    });
}
