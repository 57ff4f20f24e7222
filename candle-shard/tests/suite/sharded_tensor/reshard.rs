//! From every spec to every other one, moving what must move.
use crate::sharded_tensor::harness::*;
use candle_core::DType;
use candle_dist::{Op, comm};
use candle_shard::sharding_spec::{ShardMetadata, ShardingSpec};
use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
use itertools::Itertools;
use test_utils::{Ranks, on_ranks};

/// The elements that `rank` must send to others.
fn leaving(dims: &[usize], from: &ShardingSpec, to: &ShardingSpec, rank: usize) -> usize {
    let [from, to] = [from, to].map(|spec| spec.build_metadata(dims).unwrap());
    let common = |(a, b): (&ShardMetadata, &ShardMetadata)| -> usize {
        let range = |s: &ShardMetadata, d: usize| s.offsets[d]..s.offsets[d] + s.sizes[d];
        (0..dims.len()).map(|d| range(a, d).filter(|i| range(b, d).contains(i)).count()).product()
    };
    let pairs = from.iter().cartesian_product(&to);
    pairs.filter(|(a, b)| a.rank() == Some(rank) && b.rank() != Some(rank)).map(common).sum()
}

#[test]
fn torchs_sizes_between_both_dims_in_all_orders() {
    for world in 1..=4 {
        on_ranks(world, "orders", move |ctx| -> Result<()> {
            for dims in [[13, 21], [14, 23], [15, 26], [12, 24]] {
                let whole = values(&dims, 1, DType::F32);
                let orders = (0..world).permutations(world).collect_vec();
                for (dim, order) in [0, 1].into_iter().cartesian_product(&orders) {
                    let tensor = ShardedTensor::distribute(&whole, chunks(dim, order), ctx.group())?;
                    for (to, other) in [0, 1].into_iter().cartesian_product(&orders) {
                        let spec = chunks(to, other);
                        let moved = tensor.reshard(&spec)?;
                        assert_eq!(moved.sharding_spec(), &spec);
                        assert_is(&moved, &whole, &format!("{dims:?}: {dim} {order:?} to {to} {other:?}"));
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn between_specs_of_all_kinds_only_what_changes_its_rank_is_sent() {
    for world in 1..=5 {
        on_ranks(world, "all kinds", move |ctx| -> Result<()> {
            for (seed, shape) in SHAPES.iter().enumerate() {
                let whole = values(shape, seed as u64, [DType::F64, DType::I64, DType::F16][seed % 3]);
                let specs = specs(shape, world);
                for (from, to) in
                    specs.iter().cartesian_product(&specs).step_by(if shape.len() > 2 { 3 } else { 1 })
                {
                    let tensor = ShardedTensor::distribute(&whole, from, ctx.group())?;
                    let (moved, counts) = comm::record(|| tensor.reshard(to));
                    assert_is(&moved?, &whole, &format!("{from} to {to}"));
                    let want = leaving(shape, from, to, ctx.rank()) * whole.dtype().size_in_bytes();
                    assert_eq!(counts.get(Op::Send).bytes, want, "{from} to {to}: {counts}");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn what_is_wrong_with_reshard_is_one_error_on_all_ranks() {
    let texts = on_ranks(3, "wrong", |ctx| -> Result<Vec<String>> {
        let whole = values(&[5, 3], 1, DType::F32);
        let tensor = ShardedTensor::distribute(&whole, chunks(0, &[0, 1, 2]), ctx.group())?;
        let specs = [
            chunks(2, &[0, 1, 2]),
            chunks(1, &[0, 1, 3]),
            chunks(1, &[0, 0]),
            ChunkShardingSpec::new(1, ["cpu"])?.into(),
            grid(&[5, 2], &[vec![], vec![]], &[0]),
            ChunkShardingSpec::new(0, ["rank:1/cuda:0"])?.into(),
        ];
        let texts = specs.iter().map(|spec| tensor.reshard(spec).unwrap_err().to_string()).collect_vec();
        // Nothing has happened to the group.
        assert_is(&tensor.reshard(chunks(1, &[2, 1, 0]))?, &whole, "still works");
        Ok(texts)
    });
    assert!(texts.iter().all_equal(), "{texts:#?}");
    let parts = [
        "dim 2 of a tensor of shape [5, 3]",
        "outside the group",
        "occurs twice",
        "names no rank",
        "shards of 10 elements for a tensor of shape [5, 3]",
        "rank:1/cuda:0 [0, 0] + [5, 3] on Cpu",
    ];
    assert_eq!(texts[0].len(), parts.len());
    for (text, part) in texts[0].iter().zip(parts) {
        assert!(text.contains(part), "{text} does not say {part}");
    }
}

#[test]
fn reshards_that_differ_are_one_error_on_all_ranks() {
    let made = Ranks::new(3, "differ").run(|ctx| -> Result<String> {
        let tensor =
            ShardedTensor::distribute(&values(&[5, 3], 1, DType::F32), chunks(0, &[0, 1, 2]), ctx.group())?;
        // Over NCCL, a rank that still reads what it received would hear of the failure below.
        ctx.group().barrier()?;
        Ok(tensor.reshard(chunks(1, if ctx.rank() == 1 { &[2] } else { &[1] })).unwrap_err().to_string())
    });
    let texts = match made {
        Ok(texts) => texts,
        // The world fails too, because results on a GPU may depend on it.
        Err(error) if test_utils::over_nccl() => vec![error.to_string()],
        Err(error) => panic!("{error}"),
    };
    assert!(texts.iter().all_equal(), "{texts:#?}");
    assert!(texts[0].contains("made different calls (description differs)"), "{}", texts[0]);
}
