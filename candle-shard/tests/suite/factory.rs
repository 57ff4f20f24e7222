//! Factories, named tensors and gradients of local uses, against one device.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::comm;
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use std::collections::HashMap;
use test_utils::on_ranks;

const AXES: [&[usize]; 5] = [&[2], &[3], &[4], &[2, 2], &[3, 2]];

/// The ways in which a tensor with `rank` dims can be made on a mesh.
fn layouts(rank: usize, axes: usize) -> Vec<Vec<Placement>> {
    let choices: Vec<_> = (0..rank).map(Shard).chain([Replicate]).collect();
    on_axes(&choices, axes)
}

#[test]
fn every_factory_makes_the_shards_of_one_device() {
    let (cpu, noise) = (Device::Cpu, Stream::new(7, "noise"));
    for axes in AXES {
        let cpu = cpu.clone();
        on_ranks(axes.iter().product(), "factories", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, axes)?;
            let (even, normal) =
                (Distribution::Uniform { lo: -1.0, up: 3.0 }, Distribution::Normal { mean: 1.0, stdev: 2.0 });
            for shape in [(5, 3), (1, 4), (0, 2)] {
                for at in layouts(2, axes.len()) {
                    let (made, counts) = comm::record(|| -> Result<_> {
                        let x = DTensor::randn(1f32, 2., shape, &cpu, &mesh, &at, noise)?;
                        Ok([
                            (x.zeros_like()?, Tensor::zeros(shape, DType::F32, &cpu)?),
                            (x.ones_like()?, Tensor::ones(shape, DType::F32, &cpu)?),
                            (x.full_like(0.5)?, Tensor::full(0.5f32, shape, &cpu)?),
                            (
                                x.rand_like(-1., 3., noise)?,
                                sample_full(noise, even, &[shape.0, shape.1], DType::F32, &cpu)?,
                            ),
                            (
                                x.randn_like(1., 2., noise)?,
                                sample_full(noise, normal, &[shape.0, shape.1], DType::F32, &cpu)?,
                            ),
                            (x, sample_full(noise, normal, &[shape.0, shape.1], DType::F32, &cpu)?),
                            (
                                DTensor::rand(-1f64, 3., shape, &cpu, &mesh, &at, noise)?,
                                sample_full(noise, even, &[shape.0, shape.1], DType::F64, &cpu)?,
                            ),
                            (
                                DTensor::zeros(shape, DType::U8, &cpu, &mesh, &at)?,
                                Tensor::zeros(shape, DType::U8, &cpu)?,
                            ),
                            (
                                DTensor::ones(shape, DType::F16, &cpu, &mesh, &at)?,
                                Tensor::ones(shape, DType::F16, &cpu)?,
                            ),
                            (DTensor::full(7i64, shape, &cpu, &mesh, &at)?, Tensor::full(7i64, shape, &cpu)?),
                            (
                                DTensor::eye(4, DType::F32, &cpu, &mesh, &at)?,
                                Tensor::eye(4, DType::F32, &cpu)?,
                            ),
                            (
                                DTensor::tril2(5, DType::U8, &cpu, &mesh, &at)?,
                                Tensor::tril2(5, DType::U8, &cpu)?,
                            ),
                            (
                                DTensor::triu2(3, DType::F64, &cpu, &mesh, &at)?,
                                Tensor::triu2(3, DType::F64, &cpu)?,
                            ),
                        ])
                    });
                    assert_eq!(counts.total(), 0, "{counts}");
                    for (i, (made, want)) in made?.iter().enumerate() {
                        assert_eq!(made.placements(), at);
                        assert_eq!(value_error(made, want)?, 0.0, "factory {i}: {}", made.spec());
                    }
                }
            }
            for at in layouts(1, axes.len()) {
                let made = DTensor::arange(-2i64, 3, &cpu, &mesh, &at)?;
                assert_eq!(value_error(&made, &Tensor::arange(-2i64, 3, &cpu)?)?, 0.0, "{}", made.spec());
                let made = DTensor::arange(0.5f32, 3.25, &cpu, &mesh, &at)?;
                assert_eq!(value_error(&made, &Tensor::arange(0.5f32, 3.25, &cpu)?)?, 0.0, "{}", made.spec());
                assert_eq!(DTensor::arange(3u32, 1, &cpu, &mesh, &at)?.dims(), [0]);
                for (start, end, step) in
                    [(0.1f32, 2.0, 0.3), (3.0, -1.5, -0.7), (0.0, 1.0, 5.0), (1.0, 0.0, 0.1)]
                {
                    let want = Tensor::arange_step(start, end, step, &cpu)?;
                    let made = DTensor::arange_step(start, end, step, &cpu, &mesh, &at)?;
                    assert_eq!(
                        (made.dims(), value_error(&made, &want)?),
                        (want.dims(), 0.0),
                        "{}",
                        made.spec()
                    );
                }
                // candle's own goes past the last number of the dtype here.
                let made = DTensor::arange_step(0u8, 255, 100, &cpu, &mesh, &at)?;
                assert_eq!(made.to_vec1::<u8>()?, [0, 100, 200]);
                for (start, end, step) in [(0.0, 1.0, 0.0), (0.0, 1.0, f64::NAN), (1e17, 2e17, 1.0)] {
                    assert!(DTensor::arange_step(start, end, step, &cpu, &mesh, &at).is_err());
                }
            }
            Ok(())
        });
    }
}

#[test]
fn likes_keep_explicit_sizes_and_resolve_partial_sums() {
    on_ranks(2, "likes", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let x = DTensor::zeros((5, 2), DType::F32, &device(), &mesh, &[Shard(0)])?;
        let part = x.narrow(0, 1, 4)?;
        assert_eq!(part.ones_like()?.spec(), part.spec());
        assert_eq!(x.sum_all()?.ones_like()?.placements(), [Replicate]);
        let text = DTensor::zeros(3, DType::F32, &device(), &mesh, &[SUM]).unwrap_err().to_string();
        assert!(text.contains("as P(sum)"), "{text}");
        let text =
            DTensor::arange(0f32, f32::INFINITY, &device(), &mesh, &[Shard(0)]).unwrap_err().to_string();
        assert!(text.contains("expected finite numbers"), "{text}");
        Ok(())
    });
}

#[test]
fn named_tensors_are_spread_by_name() {
    let texts = on_ranks(2, "named", |ctx| -> Result<String> {
        let mesh = mesh(ctx, &[2])?;
        let names = ["a.weight", "b.weight", "a.bias"];
        let tensors: HashMap<String, Tensor> = names
            .iter()
            .enumerate()
            .map(|(i, n)| (n.to_string(), values(&[4 + i, 2], i as u64, DType::F32)))
            .collect();
        let of = |at: fn(&str) -> Placement| {
            let tensors = tensors.iter().map(|(name, tensor)| (name.as_str(), tensor));
            DTensor::distribute_all(tensors, &mesh, |name, _| vec![at(name)])
        };
        let spread = of(|name| if name.ends_with("weight") { Shard(0) } else { Replicate })?;
        assert_eq!(spread.keys().collect::<Vec<_>>(), ["a.bias", "a.weight", "b.weight"]);
        for (name, tensor) in &spread {
            assert_eq!(value_error(tensor, &tensors[name])?, 0.0);
        }
        Ok(of(|_| Shard(2)).unwrap_err().to_string())
    });
    assert!(texts.iter().all(|text| text.starts_with("layout: a.bias: S(2)")), "{texts:?}");
}

/// A local use with rank-dependent weights `w[rank]` of a tensor that is the same on all ranks.
#[test]
fn gradients_of_local_uses_are_converted() {
    for world in [2, 3] {
        on_ranks(world, "to_local_with_grad", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &[world])?;
            let whole = values(&[4], 1, DType::F64);
            let weights = |rank: usize| values(&[4], 10 + rank as u64, DType::F64);
            let sum = (1..world).try_fold(weights(0), |sum, rank| sum + weights(rank))?;
            for lay in [Lay::At(Replicate), Lay::Varying, Lay::At(SUM), Lay::VaryingPartial] {
                for (at, mine, want) in
                    [(SUM, weights(ctx.rank()), &sum), (Replicate, weights(0), &weights(0))]
                {
                    let leaf = Leaf::new(&whole, &mesh, &[lay])?;
                    let local = leaf.tensor.to_local_with_grad(&[at])?;
                    let grads = (local * mine)?.sum_all()?.backward()?;
                    let error = leaf.gradient_error(&grads, want)?;
                    assert!(error < 1e-12, "{lay} with gradient {at}: {error:e}");
                }
            }
            let sharded = distribute(&whole, &mesh, &[Shard(0)])?;
            assert!(sharded.to_local_with_grad(&[Shard(0)]).is_ok());
            for gradient in [&[Replicate][..], &[SUM], &[Shard(1)], &[]] {
                let text = sharded.to_local_with_grad(gradient).unwrap_err().to_string();
                assert!(text.starts_with("to_local_with_grad"), "{text}");
            }
            Ok(())
        });
    }
}
