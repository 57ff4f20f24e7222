//! Whole models under a plan.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Tensor};
use candle_dist::comm;
use candle_shard::sharded_tensor::{ShardingPlan, shard_module};
use candle_shard::{Error, Result, ShardedTensor};
use std::collections::BTreeMap;
use test_utils::on_ranks;

fn model(seed: u64) -> BTreeMap<String, Tensor> {
    let parameters: [(&str, &[usize]); 5] = [
        ("tables.0.weight", &[7, 4]),
        ("tables.1.weight", &[5, 4]),
        ("top.bias", &[3]),
        ("top.norm", &[4]),
        ("top.weight", &[3, 8]),
    ];
    parameters.iter().map(|(name, shape)| (name.to_string(), values(shape, seed, DType::F32))).collect()
}

#[test]
fn a_plan_shards_what_it_names_with_the_values_of_the_source() {
    for world in 1..=4 {
        on_ranks(world, "plan", move |ctx| -> Result<()> {
            for group in groups(ctx)? {
                let all: Vec<usize> = (0..world).collect();
                let last = world - 1;
                let plan = ShardingPlan::new()
                    .with("tables.*.weight", chunks(0, &all))
                    .with("tables.1.weight", grid(&[5, 4], &[vec![2], vec![1]], &[last, 0]))
                    .with("top.w?ight", chunks(-1, &[last]));
                // Only the source has the values.
                let want = model(1);
                let given = if group.rank() == last { model(1) } else { model(2) };
                let made = shard_module(&given, &plan, last, &group)?;
                assert_eq!(made.sharded.len() + made.rest.len(), want.len());
                for (name, tensor) in &made.sharded {
                    assert_is(tensor, &want[name], name);
                }
                assert_eq!(made.sharded["tables.0.weight"].sharding_spec(), &chunks(0, &all));
                assert_eq!(made.sharded["top.weight"].sharding_spec(), &chunks(-1, &[last]));
                assert_eq!(made.sharded["tables.1.weight"].metadata().shards.len(), 4);
                for name in ["top.bias", "top.norm"] {
                    assert_eq!(bits(&made.rest[name]), bits(&given[name]));
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_plan_that_does_not_fit_is_an_error_before_any_communication() {
    on_ranks(2, "misfit", |ctx| -> Result<()> {
        let all = chunks(0, &[0, 1]);
        let cases = [
            (
                ShardingPlan::new().with("top.wieght", &all).with("top.bias", &all),
                "\"top.wieght\" matched no parameter",
            ),
            (ShardingPlan::new().with("tables.*", &all), "\"tables.*\" matched no parameter"),
            (ShardingPlan::new().with("top.bias", chunks(1, &[0, 1])), "top.bias: ChunkShardingSpec: dim 1"),
            (
                ShardingPlan::new().with("top.bias", chunks(0, &[0, 2])),
                "rank:2/cpu of shard 1 is outside the group",
            ),
            (
                ShardingPlan::new().with_sharder("no", |_, _, _, _| unreachable!()),
                "\"no\" matched no parameter",
            ),
        ];
        for (plan, part) in cases {
            let (made, counts) = comm::record(|| shard_module(&model(1), &plan, 0, ctx.group()));
            let error = made.unwrap_err();
            assert!(matches!(error, Error::Plan(_)) && error.to_string().contains(part), "{error}");
            assert_eq!(counts.total(), 0);
        }
        let mut other = model(1);
        if ctx.rank() == 1 {
            other.insert("top.bias".into(), values(&[4], 1, DType::F32));
        }
        let error =
            shard_module(&other, &ShardingPlan::new().with("top.bias", &all), 0, ctx.group()).unwrap_err();
        let want = "rank 1: verify_parameter_shapes: \"top.bias\" is f32[4] here and f32[3] on rank 0";
        assert_eq!(error.to_string(), want);
        let shrinking = ShardingPlan::new().with_sharder("top.bias", |_, tensor, src, group| {
            ShardedTensor::shard(&tensor.narrow(0, 0, 2)?, chunks(0, &[0, 1]), src, group)
        });
        let error = shard_module(&model(1), &shrinking, 0, ctx.group()).unwrap_err().to_string();
        assert!(error.contains("top.bias: its sharder returns shape [2] for [3]; keep the shape"), "{error}");
        assert!(format!("{shrinking:?}").contains("top.bias: a sharder"));
        Ok(())
    });
}
