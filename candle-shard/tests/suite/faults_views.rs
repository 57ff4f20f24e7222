//! Faults that distributed tensors elsewhere are known for, in views, indexes and local tensors: not here.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::backend::Op;
use candle_dist::{RankContext, comm};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard};
use test_utils::{Ranks, on_ranks};

type Distributed = fn(&DTensor) -> Result<DTensor>;
type Plain = fn(&Tensor) -> candle_core::Result<Tensor>;

/// Value and gradient of an op on a leaf that lies as `lays` say, against one device.
fn check(
    ctx: &RankContext,
    (shape, axes): (&[usize], &[usize]),
    lays: &[Lay],
    ops: &[(&str, Distributed, Plain)],
) -> Result<()> {
    let mesh = mesh(ctx, axes)?;
    let whole = values(shape, 1, DType::F64);
    for (name, distributed, plain) in ops {
        let var = Var::from_tensor(&whole)?;
        let want = plain(var.as_tensor())?;
        let weights = values(want.dims(), 2, DType::F64);
        let wants = (&want * &weights)?.sum_all()?.backward()?;
        let leaf = Leaf::new(&whole, &mesh, lays)?;
        let made = distributed(&leaf.tensor)?;
        let weights = distribute(&weights, &mesh, &vec![Replicate; axes.len()])?;
        let grads = made.mul(&weights)?.sum_all()?.backward()?;
        let error = value_error(&made, &want)?.max(leaf.gradient_error(&grads, wants.get(&var).unwrap())?);
        assert!(error <= tolerance(DType::F64), "{name} of {}: {error:e}", leaf.tensor.spec());
    }
    Ok(())
}

/// Fault 2: an assignment to a slice of a sharded dim changed a gathered copy, and nothing else.
#[test]
fn assignment_to_a_slice_of_a_sharded_dim_is_seen() {
    for world in [2, 3, 4] {
        on_ranks(world, "assign", move |ctx| -> Result<()> {
            let (mesh, cpu) = (mesh(ctx, &[world])?, Device::Cpu);
            let zeros = DTensor::zeros((5, 3), DType::F32, &cpu, &mesh, &[Shard(0)])?;
            let ones = DTensor::ones((1, 3), DType::F32, &cpu, &mesh, &[Replicate])?;
            let (made, counts) = comm::record(|| zeros.slice_assign(&[4..5, 0..3], &ones));
            let made = made?;
            assert_eq!(counts.total(), 0, "{counts}");
            assert_eq!(made.placements(), [Shard(0)]);
            let whole = made.full_tensor()?.to_vec2::<f32>()?;
            assert_eq!(whole, [[0., 0., 0.], [0., 0., 0.], [0., 0., 0.], [0., 0., 0.], [1., 1., 1.]]);
            Ok(())
        });
    }
}

/// Fault 11: the gradient of `index_select` with a plain index was wrong where another dim is sharded.
#[test]
fn gradient_of_index_select_beside_a_sharded_dim() {
    for (world, at) in [(2, Shard(1)), (4, Shard(1)), (3, Shard(0))] {
        on_ranks(world, "index_select", move |ctx| {
            let select: Distributed = |x| {
                let index = Tensor::new(&[4u32, 0, 4, 1], &Device::Cpu)?;
                x.index_select(&distribute(&index, x.mesh(), &[Replicate])?, 0)
            };
            let plain: Plain = |x| x.index_select(&Tensor::new(&[4u32, 0, 4, 1], &Device::Cpu)?, 0);
            check(ctx, (&[5, 6], &[world]), &[Lay::At(at)], &[("index_select", select, plain)])
        });
    }
}

/// Faults 12 and 15: local tensors of sizes that are not the default ones came back permuted, or with another global
/// shape on each rank.
#[test]
fn ragged_local_tensors_keep_their_order() {
    for sizes in [[1usize, 3, 3, 3], [3, 3, 3, 1], [0, 4, 0, 1], [2, 2, 2, 2]] {
        on_ranks(4, "ragged", move |ctx| -> Result<()> {
            let start: usize = sizes[..ctx.rank()].iter().sum();
            let mine: Vec<f32> = (start..start + sizes[ctx.rank()]).map(|i| i as f32).collect();
            let local = Tensor::new(mine, &Device::Cpu)?;
            let (x, counts) =
                comm::record(|| DTensor::from_local_ragged(local, &mesh(ctx, &[4])?, &[Shard(0)]));
            let (x, total) = (x?, sizes.iter().sum::<usize>());
            assert_eq!((x.dims(), counts.get(Op::AllGather).count), (&[total][..], 1), "{counts}");
            let whole = x.full_tensor()?.to_vec1::<f32>()?;
            assert_eq!(whole, (0..total).map(|i| i as f32).collect::<Vec<_>>());
            Ok(())
        });
    }
}

#[test]
fn ragged_local_tensors_on_two_axes() {
    on_ranks(6, "ragged on two axes", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3, 2])?;
        let whole = values(&[5, 7], 1, DType::F64);
        let (rows, columns) = ([0..1, 1..5, 5..5], [0..5, 5..7]);
        let (rows, columns) = (&rows[mesh.coordinate()[0]], &columns[mesh.coordinate()[1]]);
        let local = whole.narrow(0, rows.start, rows.len())?.narrow(1, columns.start, columns.len())?;
        let x = DTensor::from_local_ragged(local, &mesh, &[Shard(0), Shard(1)])?;
        assert_eq!(distance(&x.full_tensor()?, &whole), 0.0);

        // The outer axis of a dim takes any sizes, the inner one cuts what is left in the default ones.
        let inner = [[1usize, 1], [2, 1], [0, 0]][mesh.coordinate()[0]][mesh.coordinate()[1]];
        let x = DTensor::from_local_ragged(whole.narrow(0, 0, inner)?, &mesh, &[Shard(0), Shard(0)])?;
        assert_eq!((x.dims(), x.spec().sizes(0).map(|s| s.to_vec())), (&[5, 7][..], Some(vec![2, 3, 0])));
        Ok(())
    });
}

/// Fault 15: what does not fit is one error on all ranks.
#[test]
fn ragged_local_tensors_that_do_not_fit_are_refused_alike() {
    let shape = |case: usize, rank: usize| match case {
        0 => (vec![2, 3 + rank / 3], DType::F32),
        1 => (vec![2; 1 + rank / 3], DType::F32),
        2 => (vec![2, 3], if rank == 1 { DType::F64 } else { DType::F32 }),
        _ => (vec![1 + rank, 3], DType::F32),
    };
    let parts = [
        "dim 1 has size 4 at [1, 1], but f32[4@a, 3]",
        "f32[2] at [0, 0] and f32[2, 2] at [1, 1]",
        "f32[2, 3] at [0, 0] and f64[2, 3] at [0, 1]",
        "dim 0 has size 2 at [0, 1], but ",
    ];
    for (case, part) in parts.into_iter().enumerate() {
        let texts = on_ranks(4, "ragged", move |ctx| -> Result<String> {
            let (dims, dtype) = shape(case, ctx.rank());
            let local = Tensor::zeros(dims, dtype, &Device::Cpu)?;
            Ok(DTensor::from_local_ragged(local, &mesh(ctx, &[2, 2])?, &[Shard(0), Replicate])
                .unwrap_err()
                .to_string())
        });
        assert!(texts.iter().all(|text| text.contains(part) && *text == texts[0]), "{part}: {texts:#?}");
    }
}

/// A wrong local tensor is seen by its rank alone; the others learn of it where they would wait for that rank.
#[test]
fn a_wrong_local_tensor_stops_all_ranks_with_its_error() {
    let failure = Ranks::new(3, "wrong local").run(|ctx| -> Result<Tensor> {
        let local = Tensor::zeros(2 - ctx.rank() / 2, DType::F32, &Device::Cpu)?;
        let x = DTensor::from_local(local, &mesh(ctx, &[3])?, &[Shard(0)], 6)?;
        let other = x.full_tensor().unwrap_err().to_string();
        assert!(other.contains("a local tensor f32[1]") && other.contains("holds [2] there"), "{other}");
        Err(candle_shard::Error::Layout(other))
    });
    assert!(failure.unwrap_err().to_string().contains("a local tensor f32[1]"));
}

/// Fault 13: `gather` with one index a row failed on some ranks of a mesh with two axes, and hung the others.
#[test]
fn gather_of_one_index_on_a_mesh_with_two_axes() {
    for lays in on_axes(&lays(2), 2) {
        on_ranks(4, "gather", move |ctx| {
            const INDEX: [[u32; 1]; 5] = [[2], [0], [5], [3], [2]];
            let gather: Distributed = |x| {
                let index = distribute(&Tensor::new(&INDEX, &Device::Cpu)?, x.mesh(), &[Replicate; 2])?;
                x.gather(&index, 1)
            };
            let plain: Plain = |x| x.gather(&Tensor::new(&INDEX, &Device::Cpu)?, 1);
            check(ctx, (&[5, 6], &[2, 2]), &lays, &[("gather", gather, plain)])
        });
    }
}

/// Fault 18: views of a dim that two axes cut in unlike pieces were built with local sizes of zero.
#[test]
fn views_of_a_dim_that_two_axes_cut_unevenly() {
    for (rows, axes) in [(5, [2, 2]), (7, [3, 2]), (3, [2, 2]), (12, [3, 2])] {
        on_ranks(axes.iter().product(), "doubly sharded", move |ctx| {
            let views: [(&str, Distributed, Plain); 5] = [
                ("flatten", |x| x.flatten_all(), |x| x.flatten_all()),
                ("unsqueeze", |x| x.unsqueeze(0), |x| x.unsqueeze(0)),
                ("split", |x| x.reshape(((), 2, 2)), |x| x.reshape(((), 2, 2))),
                ("merge", |x| x.reshape((2, ())), |x| x.reshape((2, ()))),
                ("narrow", |x| x.narrow(0, 1, 2), |x| x.narrow(0, 1, 2)),
            ];
            check(ctx, (&[rows, 4], &axes), &[Lay::At(Shard(0)); 2], &views)
        });
    }
}

#[test]
fn a_dim_that_stays_keeps_both_its_uneven_shards() {
    on_ranks(4, "kept", |ctx| -> Result<()> {
        let x = distribute(&values(&[5, 4], 1, DType::F64), &mesh(ctx, &[2, 2])?, &[Shard(0); 2])?;
        let (views, counts) =
            comm::record(|| Ok::<_, candle_shard::Error>([x.unsqueeze(0)?, x.reshape((5, 2, 2))?]));
        assert_eq!(counts.total(), 0, "{counts}");
        let placed: [&[Placement]; 2] = [&[Shard(1); 2], &[Shard(0); 2]];
        for (view, at) in views?.iter().zip(placed) {
            assert_eq!(view.placements(), at);
        }
        Ok(())
    });
}

#[test]
fn a_dim_of_one_element_that_vanishes_stays_where_it_was() {
    on_ranks(2, "one head", |ctx| -> Result<()> {
        let whole = values(&[3, 1, 4], 1, DType::F64);
        let x = distribute(&whole, &mesh(ctx, &[2])?, &[Shard(1)])?;
        let (merged, counts) = comm::record(|| x.flatten_from(1));
        let merged = merged?;
        assert_eq!(counts.total(), 0, "{counts}");
        assert_eq!(
            (merged.placements(), merged.to_local().dims()),
            (&[Shard(1)][..], &[3, [4, 0][ctx.rank()]][..])
        );
        assert_eq!(value_error(&merged, &whole.reshape((3, 4))?)?, 0.0);
        Ok(())
    });
}

/// Fault 19: dims in uneven pieces could be neither merged nor split, and `linear` refused what needed it.
#[test]
fn uneven_dims_are_merged_split_and_multiplied() {
    let layouts: [&[Lay]; 3] =
        [&[Lay::At(Shard(0)); 2], &[Lay::At(Shard(1)); 2], &[Lay::At(Shard(0)), Lay::At(Shard(1))]];
    for lays in layouts {
        on_ranks(4, "uneven", move |ctx| {
            let views: [(&str, Distributed, Plain); 5] = [
                ("merge the first", |x| x.flatten_to(1), |x| x.flatten_to(1)),
                ("merge the last", |x| x.flatten_from(1), |x| x.flatten_from(1)),
                ("split", |x| x.flatten_all()?.reshape((5, 21)), |x| x.reshape((5, 21))),
                ("other rows", |x| x.reshape((21, 5)), |x| x.reshape((21, 5))),
                (
                    "linear",
                    |x| {
                        let weight = distribute(&values(&[2, 3], 5, DType::F64), x.mesh(), &[Replicate; 2])?;
                        x.linear(&weight, None)
                    },
                    |x| x.broadcast_matmul(&values(&[2, 3], 5, DType::F64).t()?),
                ),
            ];
            check(ctx, (&[5, 7, 3], &[2, 2]), lays, &views)
        });
    }
}
