//! The same random bits on every mesh and in every layout: factories, dropout, and the parameters of layers.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_shard::nn::{Embedding, Linear, MeshVarBuilder};
use candle_shard::parallel::{ColwiseParallel, Plan, RowwiseParallel};
use candle_shard::random::{Distribution, Stream, sample_full};
use candle_shard::{DTensor, Replicate, Result, Shard};
use test_utils::on_ranks;

const MESHES: [&[usize]; 5] = [&[1], &[2], &[3], &[4], &[2, 2]];
const SHAPES: [&[usize]; 5] = [&[4, 8], &[5, 3], &[1, 7], &[2, 1, 3], &[0, 3]];

fn bits(tensor: &Tensor) -> Vec<u64> {
    if tensor.elem_count() == 0 {
        return Vec::new(); // candle panics on views without elements that begin behind their memory
    }
    let list = tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1::<f64>().unwrap();
    list.into_iter().map(f64::to_bits).collect()
}

#[test]
fn random_tensors_are_those_of_one_device() {
    for shape in MESHES {
        on_ranks(shape.iter().product(), "random", move |ctx| -> Result<()> {
            let (mesh, cpu, stream) = (mesh(ctx, shape)?, Device::Cpu, Stream::new(11, "noise"));
            let there = test_utils::device();
            let even = Distribution::Uniform { lo: -1.0, up: 1.0 };
            let normal = Distribution::Normal { mean: 0.5, stdev: 2.0 };
            for dims in SHAPES {
                let whole = |dist, dtype| sample_full(stream, dist, dims, dtype, &cpu);
                let choices: Vec<_> = (0..dims.len()).map(Shard).chain([Replicate]).collect();
                for at in on_axes(&choices, shape.len()) {
                    let made = [
                        (
                            DTensor::rand(-1f32, 1., dims, &there, &mesh, &at, stream)?,
                            whole(even, DType::F32)?,
                        ),
                        (
                            DTensor::rand(-1f64, 1., dims, &there, &mesh, &at, stream)?,
                            whole(even, DType::F64)?,
                        ),
                        (
                            DTensor::randn(0.5f32, 2., dims, &there, &mesh, &at, stream)?,
                            whole(normal, DType::F32)?,
                        ),
                        (
                            DTensor::randn(0.5f64, 2., dims, &there, &mesh, &at, stream)?,
                            whole(normal, DType::F64)?,
                        ),
                    ];
                    for (made, want) in made {
                        assert_eq!(
                            bits(made.to_local()),
                            bits(&block(&want, made.spec())?),
                            "{}",
                            made.spec()
                        );
                    }
                }
            }
            Ok(())
        });
    }
}

#[test]
fn dropout_drops_what_one_device_drops() {
    for shape in MESHES {
        on_ranks(shape.iter().product(), "dropout", move |ctx| -> Result<()> {
            let (mesh, stream) = (mesh(ctx, shape)?, Stream::new(3, "mask"));
            for dims in SHAPES {
                // Powers of two, of which halves and their sums are exact.
                let whole = values(dims, 1, DType::F64).sign()?.affine(64.0, 192.0)?;
                let one = DTensor::replicated(&whole, &mesh)?.dropout(0.4, stream)?;
                let keep =
                    sample_full(stream, Distribution::Bernoulli { p: 0.6 }, dims, DType::F64, &Device::Cpu)?;
                assert_eq!(bits(one.to_local()), bits(&(&whole * keep.affine(1.0 / 0.6, 0.0)?)?));
                for lays in on_axes(&lays(dims.len()), shape.len()) {
                    let leaf = Leaf::new(&whole, &mesh, &lays)?;
                    let dropped = leaf.tensor.dropout(0.4, stream)?;
                    let error = value_error(&dropped, one.to_local())?;
                    // A third of a number is rounded; what is dropped is zero in any case.
                    let most = if lays.contains(&Lay::At(SUM)) { 1e-15 } else { 0.0 };
                    assert!(error <= most, "{}: {error:e}", leaf.tensor.spec());
                    let whole_again = dropped.detach().full_tensor()?;
                    let zeros =
                        |t: &Tensor| Ok::<_, candle_core::Error>(bits(&t.to_device(&Device::Cpu)?.eq(0f64)?));
                    assert_eq!(zeros(&whole_again)?, zeros(one.to_local())?, "{}", leaf.tensor.spec());
                }
            }
            Ok(())
        });
    }
}

#[test]
fn parameters_are_those_of_one_device() {
    let made = MESHES.map(|shape| {
        let ranks = on_ranks(shape.iter().product(), "parameters", move |ctx| -> Result<Vec<Vec<u64>>> {
            let mesh = mesh(ctx, shape)?;
            let plan = Plan::new("a")
                .with("up", ColwiseParallel::default())
                .with("down", RowwiseParallel::default())
                .with("table", RowwiseParallel::default());
            let vb = MeshVarBuilder::fresh(42, &mesh, plan, DType::F32, &device())?;
            let linear = |name: &str| Linear::new(7, 5, true, &vb.pp(name));
            let mut weights = Vec::new();
            for layer in [linear("up")?, linear("down")?, linear("free")?] {
                weights.extend([layer.weight().clone(), layer.bias().unwrap().clone()]);
            }
            weights.push(Embedding::new(9, 4, 0.02, &vb.pp("table"))?.weight().clone());
            weights.iter().map(|weight| Ok(bits(&weight.detach().full_tensor()?))).collect()
        });
        assert!(ranks.iter().all(|rank| *rank == ranks[0]));
        ranks.into_iter().next().unwrap()
    });
    assert_eq!(made[0].len(), 7);
    assert!(made[0][0].iter().any(|&bits| bits != made[0][0][0]), "not all alike");
    for (other, shape) in made.iter().zip(MESHES) {
        assert!(*other == made[0], "{shape:?}");
    }
}
