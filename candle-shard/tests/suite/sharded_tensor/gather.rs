//! Whole again: on one rank or on all.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Var};
use candle_dist::{Op, comm};
use candle_shard::{Result, ShardedTensor};
use test_utils::on_ranks;

const DTYPES: [DType; 7] =
    [DType::U8, DType::U32, DType::I64, DType::BF16, DType::F16, DType::F32, DType::F64];

#[test]
fn what_every_spec_cuts_is_gathered_on_any_rank_and_on_all() {
    for world in 1..=5 {
        on_ranks(world, "gather", move |ctx| -> Result<()> {
            for group in groups(ctx)? {
                for (seed, shape) in SHAPES.iter().enumerate() {
                    for (nth, spec) in specs(shape, world).into_iter().enumerate() {
                        let whole = values(shape, seed as u64, DTYPES[(seed + nth) % 7]);
                        let tensor = ShardedTensor::distribute(&whole, &spec, &group)?;
                        let dst = nth % world;
                        let (gathered, counts) = comm::record(|| tensor.gather(dst));
                        let gathered = gathered?;
                        assert_eq!(gathered.is_some(), group.rank() == dst);
                        assert!(gathered.is_none_or(|gathered| bits(&gathered) == bits(&whole)), "{spec}");
                        assert_eq!(counts.total(), counts.get(Op::Gather).count, "{spec}: {counts}");
                        let (gathered, counts) = comm::record(|| tensor.gather_all());
                        assert_eq!(bits(&gathered?), bits(&whole), "{spec}");
                        assert_eq!(counts.total(), usize::from(world > 1), "{spec}: {counts}");
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn scalars_and_views_are_gathered() {
    on_ranks(2, "scalar", |ctx| -> Result<()> {
        let scalar = values(&[], 3, DType::F64);
        let tensor = ShardedTensor::distribute(&scalar, grid(&[], &[], &[1]), ctx.group())?;
        assert_eq!(bits(&tensor.gather_all()?), bits(&scalar));
        let turned = values(&[4, 3], 4, DType::F32).t()?;
        let tensor = ShardedTensor::distribute(&turned, chunks(0, &[1, 0]), ctx.group())?;
        assert_eq!(bits(&tensor.gather_all()?), bits(&turned));
        let error = tensor.gather(2).unwrap_err().to_string();
        assert!(error.contains("rank 2 is outside the group"), "{error}");
        Ok(())
    });
}

#[test]
fn a_gathered_tensor_does_not_change_with_the_variable() {
    on_ranks(1, "alias", |ctx| -> Result<()> {
        let whole = values(&[4, 3], 1, DType::F32);
        let tensor = ShardedTensor::distribute(&whole, chunks(0, &[0]), ctx.group())?;
        let (leaf, vars): (_, Vec<Var>) = tensor.to_var()?;
        let gathered =
            [leaf.gather_all()?, leaf.gather(0)?.unwrap(), leaf.reshard(chunks(1, &[0]))?.gather_all()?];
        vars[0].set(&vars[0].zeros_like()?)?;
        for gathered in gathered {
            assert!(!gathered.track_op());
            assert_eq!(bits(&gathered), bits(&whole));
        }
        Ok(())
    });
}
