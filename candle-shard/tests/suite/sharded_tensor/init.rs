//! New values in place, the same bits under every spec.
use crate::sharded_tensor::harness::*;
use candle_core::{DType, Device, Tensor};
use candle_nn::init::{FanInOut, NonLinearity};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::sharded_tensor::init;
use candle_shard::{Result, ShardedTensor};
use test_utils::on_ranks;

#[test]
fn variables_get_the_values_of_one_device_and_stay_the_same() {
    for world in 1..=4 {
        on_ranks(world, "init", move |ctx| -> Result<()> {
            let stream = Stream::new(3, "table");
            for (shape, dtype) in
                [(&[13, 8][..], DType::F32), (&[2, 6, 3, 3], DType::F64), (&[2], DType::BF16)]
            {
                for spec in specs(shape, world) {
                    let zeros = ShardedTensor::zeros(&spec, shape, dtype, &Device::Cpu, ctx.group())?;
                    let (leaf, vars) = zeros.to_var()?;
                    let is = |dist, what: &str| -> Result<()> {
                        let whole = sample_full(stream, dist, shape, dtype, &Device::Cpu)?;
                        assert_is(&leaf, &whole, &format!("{what} in {spec}"));
                        // An optimizer's variables see it.
                        for (var, shard) in vars.iter().zip(leaf.local_shards()) {
                            assert_eq!(bits(var), bits(&shard.tensor));
                            assert_eq!(var.id(), shard.tensor.id());
                        }
                        Ok(())
                    };
                    init::uniform(&leaf, -0.5, 0.25, stream)?;
                    is(Distribution::Uniform { lo: -0.5, up: 0.25 }, "uniform")?;
                    init::normal(&leaf, 1.0, 2.0, stream)?;
                    is(Distribution::Normal { mean: 1.0, stdev: 2.0 }, "normal")?;
                    for fan in [FanInOut::FanIn, FanInOut::FanOut] {
                        init::kaiming_uniform(&leaf, fan, NonLinearity::ReLU, stream)?;
                        let field: usize = shape.iter().skip(2).product();
                        let n = match fan {
                            FanInOut::FanIn => shape.get(1).map_or(1, |n| n * field),
                            FanInOut::FanOut => shape[0] * field,
                        };
                        let bound = 2f64.sqrt() * (3.0 / n as f64).sqrt();
                        is(Distribution::Uniform { lo: -bound, up: bound }, "kaiming")?;
                    }
                    init::constant(&leaf, 0.75)?;
                    assert_is(&leaf, &Tensor::full(0.75, shape, &Device::Cpu)?.to_dtype(dtype)?, "constant");
                }
            }
            Ok(())
        });
    }
}

#[test]
fn a_scalar_and_a_shard_without_elements_are_initialized() {
    on_ranks(2, "edges", |ctx| -> Result<()> {
        let scalar = ShardedTensor::zeros(grid(&[], &[], &[1]), (), DType::F32, &Device::Cpu, ctx.group())?;
        init::constant(&scalar, 4.0)?;
        assert_eq!(scalar.gather_all()?.to_scalar::<f32>()?, 4.0);
        let one = ShardedTensor::zeros(chunks(0, &[0, 1]), (1, 3), DType::F32, &Device::Cpu, ctx.group())?;
        init::constant(&one, 4.0)?;
        assert_eq!(one.gather_all()?.to_vec2::<f32>()?, [[4.0; 3]]);
        Ok(())
    });
}

#[test]
fn what_cannot_be_drawn_is_refused_on_all_ranks() {
    on_ranks(3, "refused", |ctx| -> Result<()> {
        let stream = Stream::new(3, "refused");
        let ints = ShardedTensor::zeros(chunks(0, &[1]), 4, DType::I64, &Device::Cpu, ctx.group())?;
        let none = ShardedTensor::zeros(chunks(0, &[1]), (3, 0), DType::F32, &Device::Cpu, ctx.group())?;
        for (refused, part) in [
            (init::uniform(&ints, 0., 1., stream), "not i64"),
            (init::normal(&none, f64::NAN, 1., stream), "finite mean"),
            (init::kaiming_uniform(&none, FanInOut::FanIn, NonLinearity::Linear, stream), "finite bounds"),
        ] {
            let error = refused.unwrap_err().to_string();
            assert!(error.contains(part), "{error} does not say {part}");
        }
        Ok(())
    });
}
