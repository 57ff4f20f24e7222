//! From the ranks' own tensors, and what may be wrong with them.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::{Op, comm};
use candle_shard::sharded_tensor::{LocalShard, ShardedTensorMetadata};
use candle_shard::sharding_spec::ShardMetadata;
use candle_shard::{Result, ShardedTensor};
use itertools::Itertools;
use test_utils::on_ranks;

#[test]
fn the_shards_of_every_spec_make_the_tensor_again() {
    for world in 1..=5 {
        on_ranks(world, "again", move |ctx| -> Result<()> {
            for group in groups(ctx)? {
                for (seed, &shape) in SHAPES.iter().enumerate() {
                    let whole = values(shape, seed as u64, [DType::BF16, DType::U32][seed % 2]);
                    for spec in specs(shape, world) {
                        let tensor = ShardedTensor::distribute(&whole, &spec, &group)?;
                        let held = tensor.local_shards().to_vec();
                        let again = ShardedTensor::from_local_shards(held.clone(), shape, &group)?;
                        assert_is(&again, &whole, &format!("{spec}"));
                        let (again, counts) = comm::record(|| {
                            let metadata = tensor.metadata();
                            ShardedTensor::from_local_shards_and_global_metadata(
                                held.clone(),
                                metadata,
                                &group,
                            )
                        });
                        assert_is(&again?, &whole, &format!("{spec}"));
                        assert_eq!(counts.total(), 0);
                        if let [shard] = &held[..] {
                            let local = shard.tensor.clone();
                            let again = ShardedTensor::from_local_tensor(local, &spec, shape, &group)?;
                            assert_is(&again, &whole, &format!("{spec}"));
                        } else if held.is_empty() && world > 1 {
                            // Ranks without a shard say so.
                            let local = Tensor::zeros(shape, whole.dtype(), &Device::Cpu)?;
                            let error =
                                ShardedTensor::from_local_tensor(local, &spec, shape, &group).unwrap_err();
                            assert!(error.to_string().contains("which holds []"), "{error}");
                        }
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn shards_keep_their_memory_and_their_gradient() {
    on_ranks(2, "gradient", |ctx| -> Result<()> {
        let rank = ctx.rank();
        let (leaf, vars) =
            ShardedTensor::distribute(&values(&[4, 2], 1, DType::F32), chunks(0, &[0, 1]), ctx.group())?
                .to_var()?;
        let doubled = (leaf.local_tensor()? * 2.0)?;
        let shard = LocalShard::from_tensor_and_offsets(doubled.t()?, [0, 2 * rank], rank)?;
        let (turned, counts) =
            comm::record(|| ShardedTensor::from_local_shards(vec![shard], (2, 4), ctx.group()));
        let turned = turned?;
        assert_eq!((counts.total(), counts.get(Op::AllGather).count), (2, 2), "{counts}");
        assert!(turned.requires_grad() && turned.sharding_spec() == &chunks(1, &[0, 1]));
        let grads = turned.local_tensor()?.sum_all()?.backward()?;
        assert_eq!(grads.get(&vars[0]).unwrap().to_vec2::<f32>()?, [[2., 2.], [2., 2.]]);
        Ok(())
    });
}

/// A shard of zeros that `change` has made wrong.
fn wrong(
    offsets: &[usize],
    sizes: &[usize],
    rank: usize,
    dtype: DType,
    change: impl Fn(&mut LocalShard),
) -> Vec<LocalShard> {
    let tensor = Tensor::zeros(sizes, dtype, &Device::Cpu).unwrap();
    let mut shard = LocalShard::new(tensor, shard(offsets, sizes, rank)).unwrap();
    change(&mut shard);
    vec![shard]
}

#[test]
fn shards_without_elements_end_where_the_tensor_does() {
    let texts = on_ranks(2, "no elements", |ctx| -> Result<String> {
        let held = if ctx.rank() == 0 { wrong(&[0, 0], &[0, 3], 0, DType::F32, |_| ()) } else { vec![] };
        Ok(ShardedTensor::from_local_shards(held, (0, 5), ctx.group()).unwrap_err().to_string())
    });
    assert!(texts[0] == texts[1] && texts[0].contains("end before a tensor of shape [0, 5]"), "{texts:?}");
}

#[test]
fn what_is_wrong_with_the_shards_is_one_error_on_all_ranks() {
    let texts = on_ranks(3, "wrong", |ctx| -> Result<Vec<String>> {
        let rank = ctx.rank();
        let of = |dims: [usize; 2], shards: Vec<LocalShard>| match ShardedTensor::from_local_shards(
            shards,
            &dims,
            ctx.group(),
        ) {
            Ok(tensor) => format!("{tensor} was made"),
            Err(error) => error.to_string(),
        };
        // Two rows a rank, but for what rank 1 does otherwise.
        let rows = |change: &dyn Fn(&mut LocalShard)| {
            wrong(&[2 * rank, 0], &[2, 4], rank, DType::F32, |shard| {
                if rank == 1 {
                    change(shard);
                }
            })
        };
        let instead = |offsets: &[usize], sizes: &[usize]| match rank {
            1 => wrong(offsets, sizes, 1, DType::F32, |_| ()),
            _ => rows(&|_| ()),
        };
        Ok(vec![
            of([6, 4 + usize::from(rank == 2)], rows(&|_| ())),
            of(
                [6, 4],
                if rank == 1 { wrong(&[2, 0], &[2, 4], 1, DType::F64, |_| ()) } else { rows(&|_| ()) },
            ),
            of([6, 4], rows(&|s| s.tensor = s.tensor.narrow(0, 0, 1).unwrap())),
            of([6, 4], rows(&|s| s.metadata.placement = None)),
            of([6, 4], rows(&|s| s.metadata.placement = Some("rank:2/cpu".parse().unwrap()))),
            of([6, 4], rows(&|s| s.metadata.placement = Some("trainer".parse().unwrap()))),
            of([6, 4], rows(&|s| s.metadata.placement = Some("rank:1/cuda:0".parse().unwrap()))),
            of([6, 4], rows(&|s| s.metadata.sizes.push(1))),
            of([6, 4], rows(&|s| s.metadata.offsets.push(0))),
            of([6, 4], instead(&[1, 0], &[2, 4])),
            of([6, 4], instead(&[3, 0], &[1, 4])),
            of([6, 4], instead(&[2, 0], &[2, 5])),
            of([6, 4], instead(&[2], &[2])),
            of([7, 4], rows(&|_| ())),
            of([6, 4], if rank == 1 { vec![] } else { rows(&|_| ()) }),
            of([6, 4], if rank == 1 { [rows(&|_| ()), rows(&|_| ())].concat() } else { rows(&|_| ()) }),
            of([6, 4], vec![]),
            // And nothing has happened to the group.
            of([6, 4], rows(&|_| ()))
                .replace(&format!("here [rank:{rank}/cpu [{}, 0]", 2 * rank), "here [rank:0/cpu [0, 0]"),
        ])
    });
    assert!(texts.iter().all_equal(), "{texts:#?}");
    let parts = [
        "rank 2 of the group names the shape [6, 5], and rank 0 [6, 4]",
        "rank 1 of the group gives f64, and the first shard is f32",
        "rank 1 of the group: a tensor of shape [1, 4] for shard rank:1/cpu [2, 0] + [2, 4]",
        "rank 1 of the group: shard nobody [2, 0] + [2, 4] has no placement; give rank:1",
        "rank 1 of the group: shard rank:2/cpu [2, 0] + [2, 4] is not placed on rank:1",
        "shard trainer/cpu [2, 0] + [2, 4] is not placed on rank:1",
        "rank 1 of the group: shard rank:1/cuda:0 [2, 0] + [2, 4] on Cpu",
        "rank 1 of the group: a tensor of shape [2, 4] for shard",
        "offsets [2, 0, 0] and sizes [2, 4]",
        "shards 0 and 1 overlap",
        "shards of 20 elements for a tensor of shape [6, 4], which has 24",
        "rank:1/cpu [2, 0] + [2, 5] ends beyond a tensor of shape [6, 4]",
        "shards with different numbers of dims",
        "shards of 24 elements for a tensor of shape [7, 4], which has 28",
        "shards of 16 elements",
        "shards 1 and 2 overlap",
        "no shards; give at least one",
        "in chunks of dim 0 at [rank:0/cpu, rank:1/cpu, rank:2/cpu], here [rank:0/cpu [0, 0] + [2, 4]]",
    ];
    for (text, part) in texts[0].iter().zip_eq(parts) {
        assert!(text.contains(part), "{text} does not say {part}");
    }
}

#[test]
fn a_rank_hears_what_does_not_fit_the_metadata_or_the_spec() {
    on_ranks(2, "metadata", |ctx| -> Result<()> {
        let (rank, group) = (ctx.rank(), ctx.group());
        let rows: Vec<ShardMetadata> = chunks(0, &[0, 1]).build_metadata(&[4, 2])?;
        let metadata = ShardedTensorMetadata { shards: rows, dims: vec![4, 2], dtype: DType::F32 };
        let by = |shards: Vec<LocalShard>, metadata: &ShardedTensorMetadata| {
            let made = ShardedTensor::from_local_shards_and_global_metadata(shards, metadata, group);
            made.unwrap_err().to_string()
        };
        let mine = |dtype| wrong(&[2 * rank, 0], &[2, 2], rank, dtype, |_| ());
        let cases = [
            (by(mine(DType::F64), &metadata), "f64 in shard"),
            (by(vec![], &metadata), "shards [] on a rank that holds [rank:"),
            (by(wrong(&[1, 0], &[2, 2], rank, DType::F32, |_| ()), &metadata), "give these"),
            (
                by(mine(DType::F32), &ShardedTensorMetadata { dims: vec![5, 2], ..metadata.clone() }),
                "which has 10",
            ),
            (
                by(mine(DType::F32), &ShardedTensorMetadata { shards: vec![], ..metadata.clone() }),
                "no shards",
            ),
        ];
        for (text, part) in cases {
            assert!(text.contains(part), "{text} does not say {part}");
        }
        let local = Tensor::zeros((3, 2), DType::F32, &Device::Cpu)?;
        let error = ShardedTensor::from_local_tensor(local, chunks(0, &[0, 1]), (4, 2), group)
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("a local tensor of shape [3, 2]") && error.contains("holds [rank:"),
            "{error}"
        );
        let local = Tensor::zeros((2, 2), DType::F32, &Device::Cpu)?;
        assert!(LocalShard::new(local.clone(), shard(&[0, 0], &[2, 1], 0)).is_err());
        assert!(LocalShard::from_tensor_and_offsets(local, [0], 0).is_err());
        Ok(())
    });
}
