//! Bias balancing: counts, updates, and the work of ranks under Zipf routing.
use super::harness::{Routing, TRAIN, build, config, errors_of, tokens, truth};
use candle_core::{DType, Device, Tensor};
use candle_shard::nn::{MeshVarBuilder, MoE, MoEConfig, Mode, Scores};
use candle_shard::parallel::Plan;
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{Replicate, Result, Shard};
use test_utils::on_ranks;

/// Tokens whose first coordinates are logits: noise plus the logarithms of Zipf's frequencies.
fn zipf(tokens: usize, experts: usize, step: u64) -> candle_core::Result<Tensor> {
    let even = Distribution::Uniform { lo: 1e-6, up: 1.0 };
    let noise =
        sample_full(Stream::new(5, "zipf").fold(step), even, &[tokens, experts], DType::F64, &Device::Cpu)?;
    let noise = noise.log()?.neg()?.log()?.neg()?; // Gumbel
    let favor = Tensor::from_iter((0..experts).map(|expert| -((expert + 1) as f64).ln()), &Device::Cpu)?;
    noise.broadcast_add(&favor)
}

#[test]
fn under_zipf_routing_the_bias_balances_the_rows_of_ranks() {
    for world in [2, 4] {
        on_ranks(world, "zipf", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("ep", world)])?;
            let experts = 16;
            let config = MoEConfig::new(experts, 5, experts, 2)
                .expert_axis("ep")
                .scores(Scores::Sigmoid)
                .normalize(true)
                .bias(true);
            let vb = MeshVarBuilder::fresh(3, &mesh, Plan::new("ep"), DType::F64, &test_utils::device())?;
            let layer = MoE::new(config, &vb)?;
            for parameter in vb.finish()?.iter().filter(|p| p.name == "router.weight") {
                parameter.var.set(
                    &Tensor::eye(experts, DType::F64, &Device::Cpu)?.to_device(&test_utils::device())?,
                )?;
            }
            let worst = |step: u64| -> Result<f64> {
                let x = test_utils::distribute(&zipf(2048, experts, step)?, &mesh, &[Shard(0)])?;
                let load = layer.forward(&x, TRAIN)?.load;
                let mean = load.ranks.iter().sum::<usize>() as f64 / world as f64;
                Ok(load.ranks.iter().copied().max().unwrap() as f64 / mean)
            };
            let before = worst(0)?;
            assert!(before > 1.2, "Zipf routing is uneven: {before}");
            for step in 1..120 {
                worst(step)?;
                layer.update_bias(if step < 60 { 0.02 } else { 0.005 }, None)?;
            }
            for step in 1000..1005 {
                let after = worst(step)?;
                assert!(after <= 1.15, "{after} on {world}, {before} before");
            }
            Ok(())
        });
    }
}

#[test]
fn the_bias_moves_alike_on_all_meshes_and_changes_the_choice_alone() {
    let moved = |shape: [usize; 2]| {
        on_ranks(shape[0] * shape[1], "bias", move |ctx| -> Result<Vec<f64>> {
            let mesh = ctx.mesh(&[("dp", shape[0]), ("ep", shape[1])])?;
            let config = config(5, 2).bias(true).normalize(true);
            let one = truth(&config, &[9, 6], Routing::Random, DType::F64)?;
            let (layer, parameters) = build(&config, &mesh, &one)?;
            let spec = tokens(&mesh, &one, &[Shard(0), Shard(0)], None)?;
            let x = test_utils::distribute(&one.x, &mesh, &[Replicate, Replicate])?;
            layer.forward(&x, TRAIN)?;
            layer.forward(&x, Mode::Eval)?; // not counted
            errors_of(&layer, &parameters, &one, spec)?;
            layer.update_bias(0.25, None)?;
            let bias = parameters.iter().find(|p| p.name == "router.bias").unwrap();
            assert!(bias.is_frozen());
            let made = bias.var.to_vec1::<f64>()?;
            let counts = &one.made.counts;
            let want = counts.iter().map(|&count| 0.25 * (18.0 / 5.0 - count as f64).signum());
            assert_eq!(made, want.collect::<Vec<_>>(), "{counts:?}");
            layer.update_bias(0.25, None)?; // no choices since: nothing moves
            assert_eq!(bias.var.to_vec1::<f64>()?, made);
            // One device with this bias chooses the same experts, and weights are scores without it.
            let mut plain = test_utils::reference_moe::Moe::new(&config, 3, DType::F64, &Device::Cpu)?;
            plain.set_bias(made.clone());
            let want = plain.forward(&one.x)?;
            assert_ne!(want.choices, one.made.choices);
            let got = layer.forward(&x, Mode::Eval)?;
            assert_eq!(got.load.experts, want.counts);
            assert!(test_utils::distance(&got.output.full_tensor()?, &want.output) < 1e-12);
            Ok(made)
        })
    };
    let first = moved([1, 1]).remove(0);
    for shape in [[1, 3], [2, 2], [3, 1]] {
        assert!(moved(shape).into_iter().all(|bias| bias == first));
    }
}

#[test]
fn replicas_outside_of_the_mesh_move_the_bias_alike() {
    let all = on_ranks(2, "replicas", |ctx| -> Result<Vec<f64>> {
        let world = ctx.mesh(&[("dp", 2), ("ep", 1)])?;
        let config = config(5, 2).bias(true);
        let one = truth(&config, &[9, 6], Routing::Random, DType::F64)?;
        let (layer, parameters) = build(&config, &world.axis("ep")?, &one)?;
        let mine = one.x.narrow(0, 4 * ctx.rank(), 4 + ctx.rank())?.contiguous()?;
        layer.forward(&test_utils::distribute(&mine, &world.axis("ep")?, &[Shard(0)])?, TRAIN)?;
        layer.update_bias(0.5, Some(world.axis_group("dp")?))?;
        let want = one.made.counts.iter().map(|&count| 0.5 * (18.0 / 5.0 - count as f64).signum());
        let bias = parameters.iter().find(|p| p.name == "router.bias").unwrap().var.to_vec1::<f64>()?;
        assert_eq!(bias, want.collect::<Vec<_>>());
        Ok(bias)
    });
    assert_eq!(all[0], all[1]);
}
