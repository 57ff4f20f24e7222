//! Placements, specs and the arithmetic of chunks.
use crate::sharded_tensor::harness::*;
use candle_shard::sharding_spec::{
    DeviceName, RemoteDevice, ShardMetadata, ShardingSpec, get_chunk_sharding_params, get_chunked_dim_size,
    get_split_size, infer_sharding_spec_from_shards_metadata,
};
use candle_shard::{ChunkShardingSpec, EnumerableShardingSpec, Result, chunk_sizes};
use itertools::Itertools;
use proptest::prelude::*;

#[test]
fn placements_are_read_and_written() -> Result<()> {
    let cases = [
        ("rank:0/cpu", Some(0), None, DeviceName::Cpu, "rank:0/cpu"),
        ("rank:12/cuda:3", Some(12), None, DeviceName::Cuda(Some(3)), "rank:12/cuda:3"),
        ("rank:1", Some(1), None, DeviceName::Cpu, "rank:1/cpu"),
        ("trainer/metal:0", None, Some("trainer"), DeviceName::Metal(Some(0)), "trainer/metal:0"),
        ("trainer", None, Some("trainer"), DeviceName::Cpu, "trainer/cpu"),
        ("cuda", None, None, DeviceName::Cuda(None), "cuda"),
        ("cuda:1", None, None, DeviceName::Cuda(Some(1)), "cuda:1"),
        ("metal", None, None, DeviceName::Metal(None), "metal"),
        ("cpu", None, None, DeviceName::Cpu, "cpu"),
    ];
    for (text, rank, worker, device, shown) in cases {
        let placement: RemoteDevice = text.parse()?;
        assert_eq!(
            (placement.rank(), placement.worker_name(), placement.device()),
            (rank, worker, device),
            "{text}"
        );
        assert_eq!(placement.to_string(), shown);
        assert_eq!(shown.parse::<RemoteDevice>()?, placement);
        let json = serde_json::to_string(&placement).unwrap();
        assert_eq!(json, format!("{shown:?}"));
        assert_eq!(serde_json::from_str::<RemoteDevice>(&json).unwrap(), placement);
    }
    assert_eq!(RemoteDevice::at_rank(2, DeviceName::Cuda(Some(1))).to_string(), "rank:2/cuda:1");
    assert_eq!("a".parse::<RemoteDevice>()?.on(DeviceName::Cuda(None)).to_string(), "a/cuda");
    Ok(())
}

#[test]
fn other_texts_are_no_placements() {
    let wrong = [
        "cuda:foo",
        "random:0",
        "rank:foo",
        "rank:0/foo",
        "rank:0/cpu2",
        "",
        "/",
        "/cpu",
        "rank:",
        "rank:0/",
        "rank:-1",
        "rank:+1",
        "rank:0/cpu/0",
        "a:b/cpu",
        "rank:99999999999999999999",
        "cuda:",
        "cpu:0",
    ];
    for text in wrong {
        let error = text.parse::<RemoteDevice>().unwrap_err().to_string();
        assert!(error.contains(&format!("{text:?}")) && error.contains("rank:N/device"), "{error}");
        assert_eq!(ChunkShardingSpec::new(0, [text]).unwrap_err().to_string(), error);
        assert!(serde_json::from_str::<RemoteDevice>(&format!("{text:?}")).is_err());
    }
}

#[test]
fn chunks_are_counted_as_torch_does() -> Result<()> {
    let splits =
        [(11, 4, 3), (12, 4, 3), (13, 4, 4), (5, 4, 2), (11, 1, 11), (11, 11, 1), (0, 3, 0), (7, 0, 7)];
    for (n, chunks, want) in splits {
        assert_eq!(get_split_size(n, chunks), want);
    }
    for (n, split, idx, want) in [(11, 3, 0, 3), (11, 3, 3, 2), (13, 4, 0, 4), (13, 4, 3, 1), (5, 2, 3, 0)] {
        assert_eq!(get_chunked_dim_size(n, split, idx), want);
    }
    assert_eq!(get_chunked_dim_size(5, usize::MAX, usize::MAX), 0);
    let forward = ChunkShardingSpec::on_ranks(0, [0, 1, 2, 3])?;
    let reverse = ChunkShardingSpec::on_ranks(0, [3, 2, 1, 0])?;
    for (spec, rank, want) in
        [(&forward, 1, (6, 6)), (&forward, 3, (18, 3)), (&reverse, 1, (12, 6)), (&reverse, 3, (0, 6))]
    {
        assert_eq!(get_chunk_sharding_params(21, 4, spec, rank)?, want);
    }
    let error = get_chunk_sharding_params(21, 4, &forward, 4).unwrap_err().to_string();
    assert!(error.contains("rank 4 holds no chunk of chunks of dim 0 at [rank:0/cpu"), "{error}");
    let error = get_chunk_sharding_params(21, 5, &forward, 0).unwrap_err().to_string();
    assert!(error.contains("5 chunks") && error.contains("which has 4"), "{error}");
    Ok(())
}

#[test]
fn chunks_lie_in_the_order_of_the_placements() -> Result<()> {
    let spec = ChunkShardingSpec::new(-2, ["rank:2/cpu", "rank:0/cuda:1", "rank:1", "rank:3"])?;
    assert_eq!((spec.dim(), spec.dim_of(&[5, 3])?, spec.placements().len()), (-2, 0, 4));
    let shards = spec.build_metadata(&[5, 3])?;
    let shown = shards.iter().map(ToString::to_string).collect_vec();
    let want = ["rank:2/cpu [0, 0] + [2, 3]", "rank:0/cuda:1 [2, 0] + [2, 3]", "rank:1/cpu [4, 0] + [1, 3]"];
    assert_eq!(shown[..3], want);
    // Beyond the last element there is nothing to begin at.
    assert_eq!((&shown[3][..], shards[3].is_empty()), ("rank:3/cpu [5, 0] + [0, 3]", true));
    for (dim, dims) in [(2, &[4, 3][..]), (-3, &[4, 3]), (0, &[]), (isize::MIN, &[4])] {
        let error = ChunkShardingSpec::on_ranks(dim, [0])?.build_metadata(dims).unwrap_err().to_string();
        assert!(error.contains(&format!("dim {dim} of a tensor of shape {dims:?}")), "{error}");
    }
    let none: [&str; 0] = [];
    assert!(ChunkShardingSpec::new(0, none).unwrap_err().to_string().contains("no placements"));
    Ok(())
}

#[test]
fn a_spec_is_bound_to_the_ranks_of_a_group() -> Result<()> {
    let wrong = [
        (&["rank:0", "rank:4"][..], "rank:4/cpu of shard 1 is outside the group; its ranks are 0 to 2"),
        (&["rank:1", "cpu"], "cpu of shard 1 names no rank"),
        (&["rank:1", "rank:2", "rank:1/cuda"], "rank 1 occurs twice"),
    ];
    for (placements, part) in wrong {
        let error = ChunkShardingSpec::new(0, placements)?.check(3).unwrap_err().to_string();
        assert!(error.contains(part), "{error}");
    }
    // A group may have ranks that hold nothing.
    ChunkShardingSpec::on_ranks(0, [2])?.check(3)?;
    let unplaced = EnumerableShardingSpec::new(vec![ShardMetadata::new([0], [3], None)?])?;
    assert!(unplaced.check(3).unwrap_err().to_string().contains("shard 0 has no placement"));
    EnumerableShardingSpec::new(vec![shard(&[0], &[3], 1), shard(&[3], &[1], 1)])?.check(2)
}

#[test]
fn listed_shards_are_the_tensor_without_overlap() -> Result<()> {
    let error =
        |shards: &[ShardMetadata]| EnumerableShardingSpec::new(shards.to_vec()).unwrap_err().to_string();
    assert!(error(&[]).contains("no shards"));
    assert!(error(&[shard(&[0, 0], &[2, 2], 0), shard(&[2], &[2], 1)]).contains("different numbers of dims"));
    let text = error(&[shard(&[0, 0], &[5, 5], 0), shard(&[5, 0], &[5, 5], 1), shard(&[2, 4], &[1, 1], 2)]);
    assert!(
        text.contains("shards 0 and 2 overlap: rank:0/cpu [0, 0] + [5, 5] and rank:2/cpu [2, 4] + [1, 1]"),
        "{text}"
    );
    let text = ShardMetadata::new([0, 1], [2], None).unwrap_err().to_string();
    assert!(text.contains("offsets [0, 1] and sizes [2]"), "{text}");
    assert!(ShardMetadata::new([2], [usize::MAX], None).unwrap_err().to_string().contains("overflow usize"));
    let mut changed = shard(&[0, 0], &[2, 2], 0);
    changed.sizes.pop();
    assert!(error(&[changed]).contains("one of each for every dim"));

    let spec = EnumerableShardingSpec::new(vec![shard(&[0, 0], &[5, 5], 0), shard(&[5, 0], &[5, 5], 1)])?;
    spec.check_tensor(&[10, 5])?;
    for (dims, part) in [
        (&[10][..], "shards with 2 dims for a tensor of shape [10]"),
        (&[9, 5], "rank:1/cpu [5, 0] + [5, 5] ends beyond a tensor of shape [9, 5]"),
        (&[10, 6], "shards of 50 elements for a tensor of shape [10, 6], which has 60"),
        (&[usize::MAX, 5], "which has uncountably many"),
    ] {
        let text = spec.check_tensor(dims).unwrap_err().to_string();
        assert!(text.contains(part), "{text}");
    }
    Ok(())
}

#[test]
fn chunks_are_told_from_other_shards() -> Result<()> {
    for (dims, ranks) in [(vec![16, 16], 0..4), (vec![7, 2, 5], 0..3), (vec![3], 0..5), (vec![6, 2], 0..1)] {
        for (dim, order) in (0..dims.len()).cartesian_product(ranks.clone().permutations(ranks.len())) {
            let spec = chunks(dim as isize, &order);
            let shards = spec.build_metadata(&dims)?;
            let inferred = infer_sharding_spec_from_shards_metadata(&shards)?;
            assert_eq!(inferred.build_metadata(&dims)?, shards);
            // One shard of the whole is chunks of any dim.
            let want = if order.len() == 1 { chunks(0, &order) } else { spec };
            assert_eq!(inferred, want);
        }
    }
    let listed = [
        vec![shard(&[0, 0], &[1, 4], 0), shard(&[1, 0], &[2, 4], 1)],
        vec![shard(&[0, 0], &[2, 4], 0), shard(&[2, 0], &[2, 4], 0)],
        vec![shard(&[0, 0], &[2, 2], 0), shard(&[0, 2], &[2, 2], 1), shard(&[2, 0], &[2, 4], 2)],
        vec![shard(&[], &[], 0)],
        vec![ShardMetadata::new([0], [2], None)?, ShardMetadata::new([2], [2], None)?],
        vec![ShardMetadata::new([0], [4], Some("trainer".parse()?))?],
    ];
    for shards in listed {
        let want = ShardingSpec::Enumerable(EnumerableShardingSpec::new(shards.clone())?);
        assert_eq!(infer_sharding_spec_from_shards_metadata(&shards)?, want);
    }
    assert!(infer_sharding_spec_from_shards_metadata(&[]).is_err());
    Ok(())
}

/// Any chunks of any dim in any order.
fn any_chunks() -> impl Strategy<Value = (Vec<usize>, ShardingSpec)> {
    (prop::collection::vec(0usize..9, 1..4), 1usize..6).prop_flat_map(|(dims, world)| {
        let order = Just((0..world).collect_vec()).prop_shuffle();
        let dim = -(dims.len() as isize)..dims.len() as isize;
        (Just(dims), dim, order).prop_map(|(dims, dim, order)| (dims, chunks(dim, &order)))
    })
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]

    #[test]
    fn chunks_cover_without_overlap_and_are_those_of_dtensor((dims, spec) in any_chunks()) {
        let shards = spec.build_metadata(&dims).unwrap();
        EnumerableShardingSpec::new(shards.clone()).unwrap().check_tensor(&dims).unwrap();
        let ShardingSpec::Chunk(spec) = spec else { unreachable!() };
        let dim = spec.dim_of(&dims).unwrap();
        let sizes = shards.iter().map(|shard| shard.sizes[dim]).collect_vec();
        prop_assert_eq!(&sizes[..], &chunk_sizes(dims[dim], shards.len())[..]);
        for (shard, placement) in shards.iter().zip(spec.placements()) {
            let rank = placement.rank().unwrap();
            let params = get_chunk_sharding_params(dims[dim], shards.len(), &spec, rank).unwrap();
            prop_assert_eq!(params, (shard.offsets[dim], shard.sizes[dim]));
        }
    }

    #[test]
    fn a_grid_covers_and_a_missing_or_doubled_cell_is_found(
        dims in prop::collection::vec(1usize..7, 1..4),
        cuts in prop::collection::vec(prop::collection::vec(0usize..7, 0..3), 3),
        at in 0usize..100,
    ) {
        let ShardingSpec::Enumerable(spec) = grid(&dims, &cuts, &[0, 1, 2]) else { unreachable!() };
        spec.check_tensor(&dims).unwrap();
        let mut shards = spec.shards().to_vec();
        let full = (0..shards.len()).filter(|&i| !shards[i].is_empty()).collect_vec();
        let at = full[at % full.len()];
        shards.push(shards[at].clone());
        prop_assert!(EnumerableShardingSpec::new(shards.clone()).unwrap_err().to_string().contains("overlap"));
        shards.pop();
        shards.remove(at);
        let covers = EnumerableShardingSpec::new(shards).and_then(|spec| spec.check_tensor(&dims));
        prop_assert!(covers.is_err());
    }
}
