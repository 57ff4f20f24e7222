//! From whole tensors to sharded ones, and what they say of themselves.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::comm;
use candle_shard::sharding_spec::ShardingSpec;
use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
use itertools::Itertools;
use test_utils::on_ranks;

#[test]
fn the_shards_of_every_spec_are_the_tensor() {
    for world in 1..=5 {
        on_ranks(world, "shard", move |ctx| -> Result<()> {
            for group in groups(ctx)? {
                for (seed, shape) in SHAPES.iter().enumerate() {
                    let whole = values(shape, seed as u64, [DType::F32, DType::I64, DType::U8][seed % 3]);
                    for (nth, spec) in specs(shape, world).into_iter().enumerate() {
                        let src = nth % world;
                        let source = (group.rank() == src).then_some(&whole);
                        let sharded = ShardedTensor::shard(source, &spec, src, &group)?;
                        assert_is(&sharded, &whole, &format!("shard {spec}"));
                        let (spread, counts) =
                            comm::record(|| ShardedTensor::distribute(&whole, &spec, &group));
                        assert_eq!(counts.total(), 0);
                        assert_is(&spread?, &whole, &format!("distribute {spec}"));
                        assert_eq!(sharded.sharding_spec(), &spec);
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn what_is_wrong_with_shard_is_one_error_on_all_ranks() {
    let texts = on_ranks(3, "wrong", |ctx| -> Result<Vec<String>> {
        let (group, whole) = (ctx.group(), values(&[4, 3], 1, DType::F32));
        let by = |spec: &ShardingSpec, src: usize, tensor: Option<&Tensor>| {
            ShardedTensor::shard(tensor, spec, src, group).map(drop).unwrap_err().to_string()
        };
        let good = chunks(0, &[0, 1, 2]);
        let other = chunks(1, &[0, 1, 2]);
        let unnamed = ChunkShardingSpec::new(0, ["rank:0/cpu", "trainer/cpu"])?.into();
        Ok(vec![
            by(if ctx.rank() == 1 { &other } else { &good }, 0, Some(&whole)),
            by(&good, if ctx.rank() == 2 { 1 } else { 0 }, Some(&whole)),
            by(&good, 3, Some(&whole)),
            by(&good, 1, (ctx.rank() != 1).then_some(&whole)),
            by(&chunks(2, &[0, 1, 2]), 0, (ctx.rank() == 0).then_some(&whole)),
            by(&chunks(0, &[0, 1, 3]), 0, Some(&whole)),
            by(&chunks(0, &[0, 1, 1]), 0, Some(&whole)),
            by(&unnamed, 0, Some(&whole)),
            // Only the source's shape is wrong.
            by(&grid(&[5, 3], &[vec![2], vec![]], &[0, 1]), 2, (ctx.rank() == 2).then_some(&whole)),
        ])
    });
    assert!(texts.iter().all_equal(), "{texts:#?}");
    let parts = [
        "rank 1 of the group shards in chunks of dim 1",
        "from rank 1, and rank 0 in chunks of dim 0",
        "src_rank 3 is outside the group; its ranks are 0 to 2",
        "rank 1 of the group, the source, passes no tensor",
        "dim 2 of a tensor of shape [4, 3]; give one from -2 to 1",
        "rank:3/cpu of shard 2 is outside the group; its ranks are 0 to 2",
        "rank 1 occurs twice",
        "trainer/cpu of shard 1 names no rank; write rank:N/device",
        "ends beyond a tensor of shape [4, 3]",
    ];
    for (text, part) in texts[0].iter().zip(parts) {
        assert!(text.contains(part), "{text} does not say {part}");
    }
}

#[test]
fn a_device_that_the_placement_does_not_name_is_refused() {
    on_ranks(2, "device", |ctx| -> Result<()> {
        let whole = values(&[4], 1, DType::F32);
        let spec = ChunkShardingSpec::new(0, ["rank:0/cuda:0", "rank:1/cuda"])?;
        for made in [
            ShardedTensor::distribute(&whole, &spec, ctx.group()),
            ShardedTensor::zeros(&spec, 4, DType::F32, &Device::Cpu, ctx.group()),
        ] {
            let text = made.unwrap_err().to_string();
            assert!(text.contains("cuda") && text.contains("name this device in the placement"), "{text}");
        }
        Ok(())
    });
}

#[test]
fn the_local_tensor_is_the_only_one() {
    on_ranks(3, "local tensor", |ctx| -> Result<()> {
        let whole = values(&[4, 6], 1, DType::F32);
        let few = ShardedTensor::distribute(&whole, chunks(1, &[2, 0]), ctx.group())?;
        let many =
            ShardedTensor::distribute(&whole, grid(&[4, 6], &[vec![2], vec![3]], &[1, 1, 0]), ctx.group())?;
        let columns = |tensor: &ShardedTensor| tensor.local_tensor().map(|local| local.dims()[1]);
        match ctx.rank() {
            1 => {
                assert!(
                    columns(&few).unwrap_err().to_string().contains("rank 1 of the group holds 0 shards")
                );
                assert!(columns(&many).unwrap_err().to_string().contains("holds 3 shards"));
            }
            0 => assert_eq!((columns(&few)?, columns(&many)?), (3, 3)),
            _ => assert_eq!((columns(&few)?, many.local_shards().len()), (3, 0)),
        }
        let text = few.to_string();
        assert!(text.contains("f32[4, 6] in chunks of dim 1 at [rank:2/cpu, rank:0/cpu]"), "{text}");
        assert_eq!((few.device().is_cpu(), few.group().size()), (true, 3));
        Ok(())
    });
}
