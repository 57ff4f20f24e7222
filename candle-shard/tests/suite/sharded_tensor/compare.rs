//! Equality and closeness: one answer on all ranks.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::comm;
use candle_shard::{Result, ShardedTensor};
use test_utils::on_ranks;

#[test]
fn equal_tensors_are_equal_under_every_spec_and_others_are_not() {
    for world in 1..=4 {
        on_ranks(world, "equal", move |ctx| -> Result<()> {
            for group in groups(ctx)? {
                for (seed, shape) in SHAPES.iter().enumerate() {
                    let whole = values(shape, seed as u64, [DType::F32, DType::U8, DType::I64][seed % 3]);
                    let other = (&whole + whole.ones_like()?)?;
                    for spec in specs(shape, world) {
                        let spread = |tensor: &Tensor| ShardedTensor::distribute(tensor, &spec, &group);
                        let (a, b, c) = (spread(&whole)?, spread(&whole)?, spread(&other)?);
                        let (same, counts) = comm::record(|| a.equal(&b));
                        assert!(
                            same? && counts.total() <= 1 && a.allclose(&b, 0.0, 0.0)?,
                            "{spec}: {counts}"
                        );
                        let empty = whole.elem_count() == 0;
                        assert_eq!((a.equal(&c)?, a.allclose(&c, 0.0, 0.5)?), (empty, empty), "{spec}");
                        assert!(a.allclose(&c, 0.0, 1.0)?, "{spec}");
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_difference_on_one_rank_is_seen_by_all() {
    for culprit in 0..3 {
        on_ranks(3, "one rank", move |ctx| -> Result<()> {
            let x =
                ShardedTensor::zeros(chunks(0, &[2, 0, 1]), (6, 2), DType::F32, &Device::Cpu, ctx.group())?;
            let local = (x.local_tensor()? + f64::from(u8::from(ctx.rank() == culprit)) * 1e-3)?;
            let y = ShardedTensor::from_local_tensor(local, x.sharding_spec(), (6, 2), ctx.group())?;
            assert_eq!(
                (x.equal(&y)?, x.allclose(&y, 0.0, 1e-4)?, x.allclose(&y, 0.0, 1e-2)?),
                (false, false, true)
            );
            Ok(())
        });
    }
}

#[test]
fn other_shapes_dtypes_and_specs_are_not_equal() {
    on_ranks(3, "others", |ctx| -> Result<()> {
        let zeros = |spec, shape: (usize, usize), dtype| {
            ShardedTensor::zeros(spec, shape, dtype, &Device::Cpu, ctx.group())
        };
        let x = zeros(chunks(0, &[0, 1, 2]), (6, 6), DType::F32)?;
        let others = [
            zeros(chunks(0, &[0, 1, 2]), (6, 5), DType::F32)?,
            zeros(chunks(0, &[0, 1, 2]), (6, 6), DType::F64)?,
            zeros(chunks(0, &[0, 2, 1]), (6, 6), DType::F32)?,
            zeros(chunks(1, &[0, 1, 2]), (6, 6), DType::F32)?,
            zeros(chunks(0, &[0, 1]), (6, 6), DType::F32)?,
        ];
        for other in &others {
            assert!(!x.equal(other)? && !x.allclose(other, 1.0, 1.0)?, "{other}");
            let error = x.copy_from(other).unwrap_err().to_string();
            assert!(error.contains("reshard and convert the other one first"), "{error}");
        }
        // The same ranks in another order are another group.
        let reversed = &groups(ctx)?[1];
        assert!(!x.equal(&x.zeros_like(None, reversed)?)?);
        assert!(x.equal(&x.zeros_like(None, None)?)?);
        Ok(())
    });
}

#[test]
fn infinities_and_nan_compare_as_in_torch() {
    on_ranks(2, "infinite", |ctx| -> Result<()> {
        let of = |a: f32, b: f32| {
            let whole = Tensor::new(&[a, b], &Device::Cpu)?;
            ShardedTensor::distribute(&whole, chunks(0, &[0, 1]), ctx.group())
        };
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        for (a, b, equal, close) in [
            ((1.0, inf), (1.0, inf), true, true),
            ((1.0, inf), (1.0, -inf), false, false),
            ((1.0, 2.0), (1.0, inf), false, false),
            ((nan, 1.0), (nan, 1.0), false, false),
            ((1.0, 1.0), (1.0, 1.125), false, true),
        ] {
            let (a, b) = (of(a.0, a.1)?, of(b.0, b.1)?);
            assert_eq!((a.equal(&b)?, a.allclose(&b, 0.25, 0.0)?), (equal, close));
        }
        Ok(())
    });
}
