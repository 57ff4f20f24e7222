//! How often a change of layout communicates: never more often than PyTorch, on meshes of one, two and three axes.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, Op, ProcessGroup, comm};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard, Spec};
use itertools::Itertools;
use test_utils::on_ranks;

const CHOICES: [Placement; 5] = [Replicate, Shard(0), Shard(1), Shard(2), SUM];

/// The collectives of PyTorch's default planner: undone from the inside out, then made from the outside in.
fn of_torch(shape: &[usize], from: &[Placement], to: &[Placement]) -> usize {
    let communicates = |axis: usize, from: Placement, to: Placement| {
        usize::from(from != to && from != Replicate && shape[axis] > 1) // one rank has nobody to tell
    };
    let (mut at, mut count) = (from.to_vec(), 0);
    if from.iter().any(|p| p.shard_dim().is_some()) {
        for axis in (0..at.len()).rev() {
            let outer = |list: &[Placement], p| (0..axis).filter(|&a| list[a] == p).collect_vec();
            let misaligned = to[axis].shard_dim().is_some() && outer(&at, to[axis]) != outer(to, to[axis]);
            let target = if misaligned { Replicate } else { to[axis] };
            count += communicates(axis, at[axis], target);
            at[axis] = target;
        }
    }
    count + (0..at.len()).map(|axis| communicates(axis, at[axis], to[axis])).sum::<usize>()
}

/// A tensor in a layout that may have partial sums.
fn laid(whole: &Tensor, mesh: &DeviceMesh, at: &[Placement]) -> Result<DTensor> {
    Ok(Leaf::new(whole, mesh, &at.iter().map(|&p| Lay::At(p)).collect_vec())?.tensor.detach())
}

#[test]
fn no_pair_of_layouts_communicates_more_often_than_with_torch() {
    // The step visits every layout of either side on three axes.
    for (shape, step) in
        [(&[2][..], 1), (&[3], 1), (&[2, 2], 1), (&[3, 2], 1), (&[2, 2, 2], 7), (&[2, 1, 3], 13)]
    {
        let tried = on_ranks(shape.iter().product(), "counts", move |ctx| -> Result<[usize; 3]> {
            let mesh = mesh(ctx, shape)?;
            let whole = values(&[5, 4, 7], 1, DType::F64);
            let layouts = on_axes(&CHOICES, shape.len());
            let [mut tried, mut ours, mut theirs] = [0; 3];
            for (from, to) in layouts.iter().cartesian_product(&layouts).step_by(step) {
                let new_sums = |(from, to): (&Placement, &Placement)| to.is_partial() && from != to;
                if from.iter().zip(to).any(new_sums) {
                    continue; // PyTorch makes none
                }
                let tensor = laid(&whole, &mesh, from)?;
                let (moved, counts) = comm::record(|| tensor.redistribute(to));
                let what =
                    format!("({}) to ({}) on {mesh}: {counts}", from.iter().join(", "), to.iter().join(", "));
                assert!(value_error(&moved?, &whole)? < 1e-12, "{what}");
                let most = of_torch(shape, from, to);
                assert!(counts.total() <= most, "{what}, PyTorch {most}");
                tried += 1;
                ours += counts.total();
                theirs += most;
            }
            Ok([tried, ours, theirs])
        });
        let [tried, ours, theirs] = tried[0];
        println!("{shape:?}: {tried} pairs, {ours} collectives, of PyTorch's planner {theirs}");
        assert!(tried > 15);
    }
}

/// What PyTorch's suite expects where a joint group of several axes exists, as it always does here.
#[test]
fn axes_that_change_alike_share_one_collective() {
    use Op::{AllGather, AllReduce, ReduceScatter};
    let (r, s0, s1) = (Replicate, Shard(0), Shard(1));
    type Case = (Vec<Placement>, Vec<Placement>, Vec<(Op, usize)>);
    let cases: Vec<Case> = vec![
        (vec![SUM, SUM], vec![r, r], vec![(AllReduce, 1)]),
        (vec![SUM, SUM], vec![s0, s0], vec![(ReduceScatter, 1)]),
        (vec![SUM, SUM], vec![s0, s1], vec![(ReduceScatter, 2)]),
        (vec![SUM, SUM, s0], vec![s0, s0, s0], vec![(ReduceScatter, 1), (AllGather, 1)]),
        (vec![SUM, s0, SUM], vec![r, r, r], vec![(AllReduce, 1), (AllGather, 1)]),
        (vec![SUM, r, SUM], vec![r, r, r], vec![(AllReduce, 1)]),
        (vec![s0, s0], vec![r, r], vec![(AllGather, 1)]),
        (vec![s0, s1], vec![r, r], vec![(AllGather, 2)]),
        (vec![s0, s0, s0], vec![s0, r, r], vec![(AllGather, 1)]),
        (vec![s0, s1, s0], vec![r, s1, r], vec![(AllGather, 1)]),
        (vec![s0, SUM, SUM], vec![s0, s0, s0], vec![(ReduceScatter, 1)]),
    ];
    for (from, to, want) in cases {
        let axes = from.len();
        for rows in [8, 5, 3] {
            let (from, to, want) = (from.clone(), to.clone(), want.clone());
            on_ranks(1 << axes, "joint", move |ctx| -> Result<()> {
                let mesh = mesh(ctx, &vec![2; axes])?;
                let whole = values(&[rows, 4], 1, DType::F64);
                let tensor = laid(&whole, &mesh, &from)?;
                let (moved, counts) = comm::record(|| tensor.redistribute(&to));
                let what = format!("({}) to ({}): {counts}", from.iter().join(", "), to.iter().join(", "));
                assert!(value_error(&moved?, &whole)? < 1e-12, "{what}");
                let total: usize = want.iter().map(|(_, n)| n).sum();
                assert!(
                    want.iter().all(|&(op, n)| counts.get(op).count == n) && counts.total() == total,
                    "{what}"
                );
                Ok(())
            });
        }
    }
}

/// Gradients of sampled changes of layout on three axes, also by way of a third layout.
#[test]
fn gradients_on_three_axes() {
    for shape in [[2, 2, 2], [3, 1, 2], [2, 3, 1]] {
        on_ranks(shape.iter().product(), "three axes", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &shape)?;
            let whole = values(&[5, 4, 3], 1, DType::F64);
            let weights = values(&[5, 4, 3], 2, DType::F64);
            let from = on_axes(&[lays(3), vec![Lay::VaryingPartial]].concat(), 3);
            let to = on_axes(&CHOICES, 3);
            for i in 0..400 {
                let (from, by, to) =
                    (&from[i * 61 % from.len()], &to[i * 47 % to.len()], &to[i * 29 % to.len()]);
                let leaf = Leaf::new(&whole, &mesh, from)?;
                let moved = leaf.tensor.redistribute(by)?.redistribute(to)?;
                let beside = distribute(&weights, &mesh, &[[Replicate; 3], [Shard(0); 3]][i % 2])?;
                let grads = moved.mul(&beside)?.add(moved.sqr()?)?.sum_all()?.backward()?;
                let want = (&weights + (&whole * 2.0)?)?;
                let error = value_error(&moved, &whole)?.max(leaf.gradient_error(&grads, &want)?);
                assert!(
                    error < 1e-11,
                    "({}) to {by:?} to {to:?} on {mesh}: {error:e}",
                    from.iter().join(", ")
                );
            }
            Ok(())
        });
    }
}

#[test]
fn a_joint_gather_for_unlike_uses_has_one_reduce_scatter_behind_it() {
    on_ranks(4, "joint views", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2, 2])?;
        let (whole, matrix) = (values(&[6, 4], 1, DType::F64), values(&[4, 8], 2, DType::F64));
        let leaf = Leaf::new(&whole, &mesh, &[Lay::At(Shard(0)); 2])?;
        let beside = distribute(&matrix, &mesh, &[Shard(1); 2])?;
        let (loss, forward) = comm::record(|| leaf.tensor.matmul(&beside)?.sum_all());
        let loss = loss?;
        let (grads, backward) = comm::record(|| loss.backward());
        let counts = (forward.get(Op::AllGather).count, backward.get(Op::ReduceScatter).count);
        assert_eq!((counts, forward.total() + backward.total()), ((1, 1), 2), "{forward}; {backward}");
        let want = matrix.sum_keepdim(1)?.t()?.broadcast_as((6, 4))?;
        assert!(leaf.gradient_error(&grads?, &want)? < 1e-12);
        Ok(())
    });
}

/// The mesh as one of 256 ranks sees it that are not there.
fn simulated(rank: usize) -> Result<DeviceMesh> {
    Ok(DeviceMesh::new(&ProcessGroup::simulated(rank, 256)?, &[("pp", 4), ("dp", 8), ("tp", 8)])?)
}

#[test]
fn the_blocks_of_256_ranks_are_the_tensor() -> Result<()> {
    let dims = [37usize, 50, 9];
    for at in on_axes(&CHOICES[..4], 3) {
        let mut held = vec![0; dims.iter().product()];
        let mut copies = 0;
        for rank in 0..256 {
            let mesh = simulated(rank)?;
            let spec = Spec::new(&mesh, &at, &dims[..], DType::F32)?;
            let block = spec.local_block();
            assert_eq!(spec.local_shape().to_vec(), block.iter().map(ExactSizeIterator::len).collect_vec());
            copies = mesh.shape().iter().zip(&at).filter(|(_, p)| **p == Replicate).map(|(n, _)| n).product();
            // One rank of those that hold the same: it is at 0 where the tensor is replicated.
            if at.iter().zip(mesh.coordinate()).any(|(p, &at)| *p == Replicate && at != 0) {
                continue;
            }
            for place in block.iter().cloned().multi_cartesian_product() {
                held[(place[0] * dims[1] + place[1]) * dims[2] + place[2]] += copies;
            }
        }
        assert!(held.iter().all(|&n| n == copies), "{at:?}");
    }
    Ok(())
}

#[test]
fn each_of_256_ranks_makes_the_calls_of_the_others_and_gets_its_shape() -> Result<()> {
    let layouts = on_axes(&CHOICES, 3);
    for (from, to) in layouts.iter().cartesian_product(&layouts).step_by(211) {
        let mut first = None;
        for rank in [0, 1, 7, 8, 63, 64, 100, 200, 254, 255] {
            let mesh = simulated(rank)?;
            let spec = Spec::new(&mesh, from, (37, 50, 9), DType::F32)?;
            let local = Tensor::zeros(spec.local_shape().as_slice(), DType::F32, &Device::Cpu)?;
            let tensor = DTensor::from_local_with_spec(local, spec)?;
            let (moved, counts) = comm::record(|| tensor.redistribute(to));
            let moved = moved?;
            assert_eq!(moved.to_local().dims(), moved.spec().local_shape().as_slice());
            let calls = counts.iter().map(|(op, count)| (op, count.count)).collect_vec();
            assert_eq!(
                first.get_or_insert_with(|| calls.clone()),
                &calls,
                "{from:?} to {to:?} on rank {rank}"
            );
        }
    }
    Ok(())
}
