//! Values and gradients against a dense loop over experts on one device.
use super::harness::{Routing, allowed, biased_truth, build, config, errors, errors_of, tokens, truth};
use candle_core::{DType, Tensor};
use candle_shard::nn::{ExpertGate, ExpertGroups, MoEConfig, Scores};
use candle_shard::{Replicate, Result, Shard};
use test_utils::on_ranks;

/// Limits that some values exceed.
const CLAMPED: ExpertGate = ExpertGate::Clamped { alpha: 1.702, limit: 0.3 };

/// Runs a layer on 1 to 5 ranks with tokens in shards of dims 0 and 1, and replicated.
fn check(label: &'static str, config: &MoEConfig, shape: [usize; 3], routing: Routing, dtype: DType) {
    for world in 1..=5 {
        let config = config.clone();
        on_ranks(world, label, move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("ep", world)])?;
            let truth = truth(&config, &shape, routing, dtype)?;
            for at in [Shard(0), Shard(1), Replicate] {
                let (error, _) = errors(&config, &truth, tokens(&mesh, &truth, &[at], None)?)?;
                assert!(error < allowed(dtype), "{label} {shape:?} {routing:?} {at} on {world}: {error:e}");
            }
            Ok(())
        });
    }
}

#[test]
fn experts_on_any_ranks_equal_one_device() {
    // One-sided with one choice: all tokens go to one expert, and the others get none.
    for (experts, top_k) in [(1, 1), (4, 1), (3, 2), (8, 3), (7, 4)] {
        for routing in [Routing::Random, Routing::OneSided] {
            check("random", &config(experts, top_k), [3, 7, 6], routing, DType::F64);
        }
    }
    check("f32", &config(5, 2), [4, 5, 6], Routing::Random, DType::F32);
}

#[test]
fn every_router_equals_one_device() {
    let softmax = config(6, 2);
    let cases = [
        softmax.clone().normalize(true).scale(2.5),
        softmax.clone().scores(Scores::Sigmoid).normalize(true).bias(true),
        softmax.clone().scores(Scores::Sigmoid).balance_weight(0.3).z_weight(0.1),
        softmax.clone().balance_weight(0.5).shared_hidden(7),
        softmax.clone().z_weight(0.2).groups(ExpertGroups { count: 3, chosen: 2, best: 2 }),
        softmax.clone().groups(ExpertGroups { count: 2, chosen: 1, best: 1 }),
        softmax.clone().logit_bias(true).normalize(true).z_weight(0.1),
        softmax.clone().scores(Scores::Sigmoid).normalize(true).normalize_epsilon(0.5).scale(1.8),
        softmax.clone().shared_hidden(4).shared_gate(true),
        // A sum of some tokens is below the least one.
        softmax.clone().normalize(true).normalize_epsilon(0.0).normalize_least(0.5),
        softmax.clone().scores(Scores::Sigmoid).normalize(true).expert_gate(ExpertGate::SquaredRelu),
        softmax.clone().expert_bias(true).expert_gate(ExpertGate::SquaredRelu).capacity_factor(0.7),
        softmax.clone().normalize(true).logit_bias(true).expert_bias(true).expert_gate(CLAMPED),
        softmax.clone().scores(Scores::Sigmoid).weigh_inputs(true).shared_hidden(4),
        softmax.clone().weigh_inputs(true).normalize(true).logit_bias(true).expert_bias(true),
        softmax.clone().weigh_inputs(true).capacity_factor(0.7).balance_weight(0.2),
        softmax.clone().capacity_factor(0.7),
        softmax.capacity_factor(0.5).normalize(true).balance_weight(0.1),
    ];
    for case in cases {
        check("router", &case, [3, 5, 6], Routing::Random, DType::F64);
        check("one-sided router", &case, [2, 3, 6], Routing::OneSided, DType::F64);
        check("router in f32", &case, [2, 3, 6], Routing::Random, DType::F32);
    }
}

/// Biases of the choice that outweigh all scores, as those of published models do, and scores whose sum is less than the constant.
#[test]
fn biased_choices_keep_the_weights_of_the_scores() {
    let base = config(8, 3).scores(Scores::Sigmoid).normalize(true).bias(true).tensor_axis("tp");
    let groups = |best| ExpertGroups { count: 4, chosen: 2, best };
    let cases = [
        base.clone().scale(2.5).groups(groups(2)).shared_hidden(7).shared_gate(true),
        base.clone().groups(groups(1)).normalize_epsilon(0.0),
        base.normalize_epsilon(1e-6),
    ];
    for ([ep, tp], config) in
        [[1, 1], [2, 1], [1, 3], [2, 2]].into_iter().flat_map(|m| cases.each_ref().map(|c| (m, c.clone())))
    {
        on_ranks(ep * tp, "biased", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("ep", ep), ("tp", tp)])?;
            for dtype in [DType::F64, DType::F32] {
                let bias: Vec<f64> = [7.03, 6.98, -1.0, 7.07, 0.0, 6.9, 7.1, 7.01].into();
                let truth = biased_truth(&config, &[3, 5, 6], Routing::Random, dtype, &bias)?;
                let plain = super::harness::truth(&config, &[3, 5, 6], Routing::Random, dtype)?;
                assert_ne!(truth.made.choices, plain.made.choices);
                for at in [Shard(0), Shard(1), Replicate] {
                    let (layer, parameters) = build(&config, &mesh, &truth)?;
                    let own = parameters.iter().find(|p| p.name == "router.bias").unwrap();
                    let bias = Tensor::new(&bias[..], &test_utils::device())?.to_dtype(dtype)?;
                    own.var.set(&bias)?;
                    let spec = tokens(&mesh, &truth, &[at, Replicate], None)?;
                    let (error, _) = errors_of(&layer, &parameters, &truth, spec)?;
                    assert!(error < allowed(dtype), "{config:?} on {ep} × {tp}, {at}: {error:e}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn fewer_tokens_than_ranks_and_ranks_without_tokens_equal_one_device() {
    for shape in [[1, 1, 6], [1, 3, 6], [2, 1, 6]] {
        check("few tokens", &config(4, 2).shared_hidden(3), shape, Routing::OneSided, DType::F64);
    }
    on_ranks(3, "uneven", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 3)])?;
        let config = config(5, 2);
        let truth = truth(&config, &[9, 6], Routing::Random, DType::F64)?;
        for sizes in [[0, 9, 0], [4, 0, 5], [1, 1, 7]] {
            let spec = tokens(&mesh, &truth, &[Shard(0)], Some(&sizes))?;
            let (error, _) = errors(&config, &truth, spec)?;
            assert!(error < 1e-12, "{sizes:?}: {error:e}");
        }
        Ok(())
    });
}

#[test]
fn given_numbers_of_experts_on_each_rank_equal_one_device() {
    on_ranks(3, "sizes", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 3)])?;
        for sizes in [vec![5, 0, 1], vec![0, 0, 6], vec![1, 2, 3]] {
            let config = config(6, 3).expert_sizes(sizes.clone());
            let truth = truth(&config, &[8, 6], Routing::Random, DType::F64)?;
            for at in [Shard(0), Replicate] {
                let (layer, parameters) = build(&config, &mesh, &truth)?;
                let rows = parameters.iter().find(|p| p.name == "experts.up_proj").unwrap().var.dims()[0];
                assert_eq!(rows, sizes[ctx.rank()]);
                let spec = tokens(&mesh, &truth, &[at], None)?;
                let (error, made) = errors_of(&layer, &parameters, &truth, spec)?;
                assert!(error < 1e-12, "{sizes:?} {at}: {error:e}");
                assert!(made.load.ranks.iter().zip(&sizes).all(|(rows, experts)| *experts > 0 || *rows == 0));
            }
        }
        Ok(())
    });
}

#[test]
fn no_token_at_all_gives_gradients_of_zeros() {
    for world in [1, 3] {
        on_ranks(world, "no tokens", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("ep", world)])?;
            let config = config(4, 2).balance_weight(0.1).z_weight(0.1).shared_hidden(3);
            let some = truth(&config, &[2, 6], Routing::Random, DType::F64)?;
            let (layer, parameters) = build(&config, &mesh, &some)?;
            let nothing = Tensor::zeros((0, 6), DType::F64, &candle_core::Device::Cpu)?;
            let x = test_utils::distribute(&nothing, &mesh, &[Shard(0)])?;
            let made = layer.forward(&x, super::harness::TRAIN)?;
            assert_eq!((made.output.dims(), made.load.sent), (&[0, 6][..], 0));
            let loss = made.output.sum_all()?.add(made.loss.unwrap())?;
            assert_eq!(loss.full_tensor()?.to_scalar::<f64>()?, 0.0);
            let grads = parameters.backward(&loss)?;
            for parameter in parameters.iter() {
                if let Some(grad) = grads.get(&parameter.var) {
                    assert_eq!(grad.flatten_all()?.to_vec1::<f64>()?, vec![0.0; parameter.var.elem_count()]);
                }
            }
            Ok(())
        });
    }
}

#[test]
fn ranks_with_the_same_tokens_and_unlike_scores_use_one_choice() {
    for shape in [[2, 1], [3, 1], [1, 2], [2, 2]] {
        on_ranks(shape[0] * shape[1], "unlike scores", move |ctx| -> Result<()> {
            let mesh = ctx.mesh(&[("ep", shape[0]), ("tp", shape[1])])?;
            let config = config(4, 1).tensor_axis("tp");
            let mut one = truth(&config, &[9, 6], Routing::OneSided, DType::F64)?;
            // Two experts tie, and one device takes the first one.
            let rows = one.weight.to_vec2::<f64>()?;
            let tied = [rows[0].clone(), rows[1].clone(), rows[0].clone(), rows[3].clone()].concat();
            one.weight = Tensor::from_vec(tied.clone(), (4, 6), &candle_core::Device::Cpu)?;
            let (layer, parameters) = build(&config, &mesh, &one)?;
            let x = test_utils::distribute(&one.x, &mesh, &[Replicate, Replicate])?;
            let want = layer.forward(&x, super::harness::TRAIN)?;
            assert_eq!(want.load.experts, [9, 0, 0, 0]);
            // Now all ranks but the first would take the other one.
            let mut unlike = tied;
            unlike[2 * 6] += if ctx.rank() == 0 { 0.0 } else { 1e-14 };
            let router = parameters.iter().find(|p| p.name == "router.weight").unwrap();
            router.var.set(&Tensor::from_vec(unlike, (4, 6), &test_utils::device())?)?;
            let made = layer.forward(&x, super::harness::TRAIN)?;
            assert_eq!(made.load, want.load);
            let error = test_utils::distance(&made.output.full_tensor()?, &want.output.full_tensor()?);
            assert!(error < 1e-12, "{shape:?}: {error:e}");
            Ok(())
        });
    }
}

#[test]
fn two_runs_have_the_same_bits() {
    on_ranks(3, "bits", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 3)])?;
        let config = config(7, 3);
        let truth = truth(&config, &[11, 6], Routing::Random, DType::F32)?;
        let (layer, parameters) = build(&config, &mesh, &truth)?;
        let run = || -> Result<Vec<Tensor>> {
            let x = test_utils::distribute(&truth.x, &mesh, &[Shard(0)])?;
            let made = layer.forward(&x, super::harness::TRAIN)?.output;
            let grads = parameters.backward(&made.sqr()?.sum_all()?)?;
            let of = parameters.iter().map(|p| grads.get(&p.var).unwrap().clone());
            Ok(std::iter::once(made.to_local().clone()).chain(of).collect())
        };
        let (first, second) = (run()?, run()?);
        assert!(first.iter().zip(&second).all(|(a, b)| candle_dist::bits::same_bits(a, b).unwrap()));
        Ok(())
    });
}
