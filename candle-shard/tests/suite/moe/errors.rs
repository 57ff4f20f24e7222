//! Wrong options and wrong data: one identical error on all ranks.
use super::harness::{Routing, TRAIN, build, config, truth};
use candle_core::{DType, Device, Tensor};
use candle_shard::nn::{ExpertGate, ExpertGroups, MeshVarBuilder, MoE, MoEConfig};
use candle_shard::parallel::Plan;
use candle_shard::{Replicate, Result, Shard};
use test_utils::on_ranks;

#[test]
fn options_that_do_not_fit_are_one_error_on_all_ranks() {
    let groups = |count, chosen| Some(ExpertGroups { count, chosen, best: 2 });
    let cases: Vec<(MoEConfig, &[&str])> = vec![
        (config(4, 5), &["top 5 of 4", "at most 4"]),
        (config(4, 0), &["top 0"]),
        (config(0, 1), &["0 experts"]),
        (config(4, 1).expert_sizes(vec![2, 1]), &["[2, 1]", "sum 4"]),
        (config(4, 1).expert_sizes(vec![2, 1, 1]), &["[2, 1, 1]", "2 ranks"]),
        (config(4, 1).expert_sizes(vec![usize::MAX, 5]), &["sum 4"]),
        (MoEConfig::new(6, 5, 4, 1).expert_sizes(vec![4]), &["without an expert_axis"]),
        (config(4, 1).expert_axis("pe"), &["pe"]),
        (config(4, 1).tensor_axis("ep"), &["one axis", "use two"]),
        (config(4, 1).groups(groups(3, 1)), &["1 of 3 groups of 4"]),
        (config(4, 3).groups(groups(2, 1)), &["top 3 of the 2 experts"]),
        (config(4, 1).groups(groups(2, 3)), &["3 of 2 groups"]),
        (config(4, 1).groups(ExpertGroups { count: 2, chosen: 1, best: 0 }), &["best 0 scores"]),
        (config(4, 1).normalize_epsilon(f64::INFINITY), &["normalize_epsilon inf"]),
        (config(4, 1).normalize_least(f64::NAN), &["normalize_least NaN"]),
        (
            config(4, 1).expert_gate(ExpertGate::Clamped { alpha: 1.7, limit: 0.0 }),
            &["alpha 1.7 and limit 0", "expected positive numbers"],
        ),
        (config(4, 1).shared_gate(true), &["shared_gate", "give shared_hidden"]),
        (config(4, 1).capacity_factor(0.0), &["capacity_factor 0"]),
        (config(4, 1).z_weight(f64::NAN), &["z_weight NaN"]),
    ];
    for (config, parts) in cases {
        let texts = on_ranks(2, "options", move |ctx| -> Result<String> {
            let mesh = ctx.mesh(&[("ep", 2)])?;
            let vb = MeshVarBuilder::fresh(3, &mesh, Plan::new("ep"), DType::F32, &test_utils::device())?;
            Ok(MoE::new(config.clone(), &vb).unwrap_err().to_string())
        });
        assert_eq!(texts[0], texts[1]);
        assert!(parts.iter().all(|part| texts[0].contains(part)), "{} without {parts:?}", texts[0]);
    }
}

#[test]
fn a_token_with_nan_is_named_by_one_error_on_all_ranks_and_the_layer_goes_on() {
    for at in [[Shard(0), Shard(0)], [Shard(0), Shard(1)], [Replicate, Shard(1)], [Replicate, Replicate]] {
        let texts = on_ranks(4, "nan", move |ctx| -> Result<String> {
            let mesh = ctx.mesh(&[("dp", 2), ("ep", 2)])?;
            let config = config(5, 2).capacity_factor(1.5);
            let truth = truth(&config, &[5, 3, 6], Routing::Random, DType::F64)?;
            let (layer, _) = build(&config, &mesh, &truth)?;
            // Tokens [2, 1] and [4, 2].
            let mut numbers = truth.x.flatten_all()?.to_vec1::<f64>()?;
            numbers[(2 * 3 + 1) * 6 + 4] = f64::NAN;
            numbers[(4 * 3 + 2) * 6] = f64::INFINITY;
            let x = Tensor::from_vec(numbers, (5, 3, 6), &Device::Cpu)?;
            let x = test_utils::distribute(&x, &mesh, &at)?;
            let text = layer.forward(&x, TRAIN).unwrap_err().to_string();
            let x = test_utils::distribute(&truth.x, &mesh, &at)?;
            layer.forward(&x, TRAIN)?;
            Ok(text)
        });
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
        assert!(texts[0].starts_with("moe: ") && texts[0].contains("token [2, 1] of f64[5"), "{}", texts[0]);
    }
}

#[test]
fn inputs_that_do_not_fit_are_refused() {
    on_ranks(2, "inputs", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 2)])?;
        let config = config(4, 2);
        let truth = truth(&config, &[5, 6], Routing::Random, DType::F64)?;
        let (layer, _) = build(&config, &mesh, &truth)?;
        for (shape, dtype) in [(vec![5, 7], DType::F64), (vec![6], DType::F64), (vec![5, 6], DType::F32)] {
            let x = Tensor::zeros(shape, dtype, &Device::Cpu)?;
            let x = test_utils::distribute(&x, &mesh, &[Replicate])?;
            let text = layer.forward(&x, TRAIN).unwrap_err().to_string();
            assert!(text.contains("expected f64[.., 6]"), "{text}");
        }
        assert!(layer.update_bias(0.1, None).unwrap_err().to_string().contains("MoEConfig::bias"));
        Ok(())
    });
}

#[test]
fn experts_cut_over_the_fully_sharded_axis_are_refused() {
    on_ranks(2, "fsdp axis", |ctx| -> Result<()> {
        let mesh = ctx.mesh(&[("ep", 2), ("tp", 1)])?;
        let vb = MeshVarBuilder::fresh(3, &mesh, Plan::new("tp"), DType::F32, &test_utils::device())?;
        let text =
            MoE::new(config(4, 2), &vb.fully_shard("ep", Default::default())?).unwrap_err().to_string();
        assert!(text.contains("experts.gate_proj") && text.contains("use two axes"), "{text}");
        Ok(())
    });
}

/// Layers of one shape that ranks call in unlike orders, as the values of a `HashMap` may be.
#[test]
fn layers_in_unlike_orders_are_an_error_on_all_ranks() {
    for at in [[Shard(0), Shard(0)], [Shard(0), Replicate], [Replicate, Shard(1)]] {
        for factor in [None, Some(1.5)] {
            let texts = on_ranks(4, "orders", move |ctx| -> Result<String> {
                let mesh = ctx.mesh(&[("dp", 2), ("ep", 2)])?;
                let config = config(5, 2).capacity_factor(factor);
                let vb = MeshVarBuilder::fresh(3, &mesh, Plan::new("ep"), DType::F64, &test_utils::device())?;
                let layers = [MoE::new(config.clone(), &vb.pp("a"))?, MoE::new(config.clone(), &vb.pp("b"))?];
                let truth = truth(&config, &[4, 2, 6], Routing::Random, DType::F64)?;
                let x = test_utils::distribute(&truth.x, &mesh, &at)?;
                let first = usize::from(ctx.rank() == 1);
                ctx.group().barrier()?;
                let run = || -> Result<()> {
                    layers[first].forward(&x, TRAIN)?;
                    layers[1 - first].forward(&x, TRAIN).map(drop)
                };
                Ok(run().unwrap_err().to_string())
            });
            assert!(texts.iter().all(|text| text.contains("description")), "{at:?}: {texts:?}");
        }
    }
}
