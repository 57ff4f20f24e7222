//! Tensors made where they lie.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::comm;
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
use test_utils::on_ranks;

#[test]
fn factories_make_the_tensors_of_one_device_without_communication() {
    for world in 1..=5 {
        on_ranks(world, "factories", move |ctx| -> Result<()> {
            let (cpu, stream) = (&Device::Cpu, Stream::new(7, "made"));
            for group in groups(ctx)? {
                for &shape in &SHAPES {
                    for spec in specs(shape, world) {
                        let (made, counts) = comm::record(|| -> Result<_> {
                            Ok([
                                ShardedTensor::zeros(&spec, shape, DType::F16, cpu, &group)?,
                                ShardedTensor::ones(&spec, shape, DType::I64, cpu, &group)?,
                                ShardedTensor::full(9u8, &spec, shape, cpu, &group)?,
                                ShardedTensor::rand(-1f32, 2., &spec, shape, cpu, &group, stream)?,
                                ShardedTensor::randn(1f64, 0.5, &spec, shape, cpu, &group, stream)?,
                            ])
                        });
                        assert_eq!(counts.total(), 0);
                        let even = Distribution::Uniform { lo: -1.0, up: 2.0 };
                        let normal = Distribution::Normal { mean: 1.0, stdev: 0.5 };
                        let wholes = [
                            Tensor::zeros(shape, DType::F16, cpu)?,
                            Tensor::ones(shape, DType::I64, cpu)?,
                            Tensor::full(9u8, shape, cpu)?,
                            sample_full(stream, even, shape, DType::F32, cpu)?,
                            sample_full(stream, normal, shape, DType::F64, cpu)?,
                        ];
                        for (made, whole) in made?.iter().zip(&wholes) {
                            assert_is(made, whole, &format!("{spec}"));
                        }
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn like_tensors_lie_alike() {
    on_ranks(3, "like", |ctx| -> Result<()> {
        let (shape, stream) = (&[5, 4][..], Stream::new(7, "like"));
        let whole = values(shape, 1, DType::F32);
        for spec in specs(shape, 3) {
            let x = ShardedTensor::distribute(&whole, &spec, ctx.group())?;
            assert_is(&x.zeros_like(None, None)?, &whole.zeros_like()?, "zeros");
            assert_is(&x.ones_like(None, None)?, &whole.ones_like()?, "ones");
            assert_is(&x.full_like(2.5, None, None)?, &(whole.ones_like()? * 2.5)?, "full");
            let even = Distribution::Uniform { lo: 0.0, up: 3.0 };
            let want = sample_full(stream, even, shape, DType::F32, &Device::Cpu)?;
            assert_is(&x.rand_like((0., 3.), None, None, stream)?, &want, "rand");
            let normal = Distribution::Normal { mean: 2.0, stdev: 1.0 };
            let want = sample_full(stream, normal, shape, DType::BF16, &Device::Cpu)?;
            assert_is(&x.randn_like((2., 1.), DType::BF16, None, stream)?, &want, "randn");
        }
        Ok(())
    });
}

#[test]
fn what_cannot_be_made_is_refused_on_all_ranks_also_those_without_shards() {
    on_ranks(3, "refused", |ctx| -> Result<()> {
        let (cpu, stream) = (&Device::Cpu, Stream::new(7, "refused"));
        let few = chunks(0, &[1]);
        let floats = ShardedTensor::zeros(&few, 4, DType::F32, cpu, ctx.group())?;
        let ints = ShardedTensor::zeros(&few, 4, DType::I64, cpu, ctx.group())?;
        let errors = [
            (
                ShardedTensor::zeros(chunks(1, &[0]), 4, DType::F32, cpu, ctx.group()),
                "dim 1 of a tensor of shape [4]",
            ),
            (ShardedTensor::ones(chunks(0, &[3]), 4, DType::F32, cpu, ctx.group()), "outside the group"),
            (
                ShardedTensor::zeros(ChunkShardingSpec::new(0, ["a"])?, 4, DType::F32, cpu, ctx.group()),
                "names no rank",
            ),
            (
                ShardedTensor::ones(&few, (usize::MAX, 2), DType::F32, cpu, ctx.group()),
                "more elements than can be counted",
            ),
            (ShardedTensor::rand(2f32, 1., &few, 4, cpu, ctx.group(), stream), "lo 2 and up 1"),
            (floats.randn_like((0., -1.), None, None, stream), "stdev -1"),
            (ints.rand_like((0., 1.), None, None, stream), "not i64"),
        ];
        for (made, part) in errors {
            let error = made.unwrap_err().to_string();
            assert!(error.contains(part), "{error} does not say {part}");
        }
        Ok(())
    });
}
