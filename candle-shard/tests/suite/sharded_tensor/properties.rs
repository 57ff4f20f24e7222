//! Random specs: what goes round comes round.
use crate::sharded_tensor::harness::*;
use candle_core::DType;
use candle_shard::sharding_spec::ShardingSpec;
use candle_shard::{Result, ShardedTensor};
use itertools::Itertools;
use proptest::prelude::*;
use test_utils::on_ranks;

/// Any spec for a tensor of this shape: chunks in any order on some ranks, or any grid dealt out to any ranks.
fn any_spec(dims: Vec<usize>, world: usize) -> impl Strategy<Value = ShardingSpec> {
    let order = Just((0..world).collect_vec()).prop_shuffle();
    let chunked =
        (0..dims.len(), order, 1..=world).prop_map(|(dim, order, n)| chunks(dim as isize, &order[..n]));
    let cuts = prop::collection::vec(prop::collection::vec(0usize..9, 0..3), dims.len());
    let ranks = prop::collection::vec(0..world, 1..7);
    let listed = (cuts, ranks).prop_map(move |(cuts, ranks)| grid(&dims, &cuts, &ranks));
    prop_oneof![chunked, listed]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(96) })]

    #[test]
    fn a_tensor_comes_back_whole_by_way_of_any_specs(
        (dims, world, by) in (prop::collection::vec(0usize..8, 1..4), 1usize..=5).prop_flat_map(|(dims, world)| {
            let by = prop::collection::vec(any_spec(dims.clone(), world), 1..5);
            (Just(dims), Just(world), by)
        }),
        src in 0usize..5,
    ) {
        on_ranks(world, "any specs", move |ctx| -> Result<()> {
            let whole = values(&dims, 5, DType::F64);
            let src = src % world;
            let mut tensor = ShardedTensor::shard((ctx.rank() == src).then_some(&whole), &by[0], src, ctx.group())?;
            for spec in &by[1..] {
                tensor = tensor.reshard(spec)?;
            }
            assert_is(&tensor, &whole, "resharded");
            let again = ShardedTensor::from_local_shards(tensor.local_shards().to_vec(), &dims[..], ctx.group())?;
            assert_eq!(bits(&again.gather_all()?), bits(&whole));
            assert!(tensor.gather(src)?.is_none_or(|gathered| bits(&gathered) == bits(&whole)));
            Ok(())
        });
    }
}
