//! Every change of layout against one device: values, gradients, and what it communicates.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

use crate::common::*;
use candle_core::{DType, Device, Tensor};
use candle_dist::{DeviceMesh, Op, comm};
use candle_shard::{DTensor, Placement, Replicate, Result, Shard, Spec};
use itertools::Itertools;
use proptest::prelude::*;
use std::sync::Arc;
use test_utils::on_ranks;

const MESHES: [&[usize]; 7] = [&[1], &[2], &[3], &[4], &[5], &[2, 2], &[3, 2]];
const TARGETS: [Placement; 4] = [Replicate, Shard(0), Shard(1), SUM];

/// All ways of a 2-dim leaf to lie on a mesh.
fn sources(mesh: &DeviceMesh) -> Vec<Vec<Lay>> {
    on_axes(&[lays(2), vec![Lay::VaryingPartial]].concat(), mesh.ndim())
}

fn show<T: std::fmt::Display>(list: &[T]) -> String {
    list.iter().join(", ")
}

/// A fixed tensor to weigh results with, so that gradients are not uniform, in the `which`-th layout.
fn weights(whole: &Tensor, mesh: &DeviceMesh, which: usize) -> Result<DTensor> {
    let layouts = on_axes(&TARGETS[..3], mesh.ndim());
    distribute(whole, mesh, &layouts[which % layouts.len()])
}

/// Checks `leaf.redistribute(to)` for value and gradient.
fn check(leaf: &Leaf, whole: &Tensor, to: &[Placement], which: usize) -> Result<f64> {
    let w = values(whole.dims(), 77, whole.dtype());
    let y = leaf.tensor.redistribute(to)?;
    assert_eq!(y.placements(), to);
    assert!(distance(&y.full_tensor()?, whole) <= tolerance(whole.dtype()), "full_tensor");
    let weights = weights(&w, y.mesh(), which)?;
    let error = value_error(&y, whole)?;
    let (loss, gradient) = if which.is_multiple_of(2) {
        (y.mul(&weights)?.sum_all()?, w)
    } else {
        (y.mul(&y)?.mul(&weights)?.sum_all()?, ((whole * w)? * 2.0)?)
    };
    Ok(error.max(leaf.gradient_error(&loss.backward()?, &gradient)?))
}

#[test]
fn every_pair_of_layouts_keeps_value_and_gradient() {
    let cases: Vec<usize> = MESHES
        .into_iter()
        .map(|shape| {
            let counts = on_ranks(shape.iter().product(), "pairs", move |ctx| -> Result<usize> {
                let mesh = mesh(ctx, shape)?;
                let dtypes: &[DType] =
                    if shape.len() == 1 { &[DType::F64, DType::F32] } else { &[DType::F64] };
                let mut cases = 0;
                for (dims, &dtype) in SHAPES.iter().cartesian_product(dtypes) {
                    let whole = values(dims, 5, dtype);
                    for (from, to) in sources(&mesh).iter().cartesian_product(on_axes(&TARGETS, mesh.ndim()))
                    {
                        let error = check(&Leaf::new(&whole, &mesh, from)?, &whole, &to, cases)?;
                        let ways = format!("{dims:?} on {mesh}: [{}] to [{}]", show(from), show(&to));
                        assert!(error <= tolerance(dtype), "{ways}: error {error:e}");
                        cases += 1;
                    }
                }
                Ok(cases)
            });
            counts[0]
        })
        .collect();
    println!("redistribute: {} cases on {MESHES:?}, all equal", cases.iter().sum::<usize>());
}

#[test]
fn explicit_sizes_keep_value_and_gradient() {
    for shape in [&[3][..], &[2, 2]] {
        on_ranks(shape.iter().product(), "sizes", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            let whole = values(&[5, 4], 3, DType::F64);
            let sizes: [&[usize]; 4] = [&[1, 4], &[5, 0], &[0, 1, 4], &[3, 0, 2]];
            let mut which = 0;
            for (at, sizes) in
                on_axes(&[Shard(0), Shard(1), Replicate], mesh.ndim()).iter().cartesian_product(sizes)
            {
                let spec = Spec::new(&mesh, at, (5, 4), DType::F64)?;
                let Some(axis) = at.iter().position(|&p| p == Shard(0)) else { continue };
                if sizes.len() != mesh.shape()[axis] {
                    continue;
                }
                let spec = spec.with_sizes(axis, Some(Arc::from(sizes)))?;
                for to in on_axes(&TARGETS, mesh.ndim()) {
                    let from: Vec<Lay> = at.iter().map(|&p| Lay::At(p)).collect();
                    let error = check(&Leaf::with_spec(&whole, spec.clone(), &from)?, &whole, &to, which)?;
                    assert!(error <= 1e-11, "{spec} to [{}]: error {error:e}", show(&to));
                    which += 1;
                }
            }
            assert!(which > 0);
            Ok(())
        });
    }
}

/// One leaf through two layouts, both used: the error of values and gradient on the worst rank.
fn chain(shape: &'static [usize], dims: [usize; 2], picks: Vec<usize>) -> f64 {
    let errors = on_ranks(shape.iter().product(), "chain", move |ctx| -> Result<f64> {
        let mesh = mesh(ctx, shape)?;
        let pick = |n: usize, from: usize| picks[n] % from;
        let (sources, targets) = (sources(&mesh), on_axes(&TARGETS, mesh.ndim()));
        let whole = values(&dims, 1, DType::F64);
        let leaf = Leaf::new(&whole, &mesh, &sources[pick(0, sources.len())])?;
        let first = leaf.tensor.redistribute(&targets[pick(1, targets.len())])?;
        let second = first.redistribute(&targets[pick(2, targets.len())])?;
        let (u, v) = (values(&dims, 2, DType::F64), values(&dims, 3, DType::F64));
        let loss = first.mul(&weights(&u, &mesh, picks[3])?)?.sum_all()?;
        let loss = loss.add(&second.mul(&second)?.mul(&weights(&v, &mesh, picks[4])?)?.sum_all()?)?;
        let gradient = (u + ((&whole * v)? * 2.0)?)?;
        let values = value_error(&first, &whole)?.max(value_error(&second, &whole)?);
        Ok(values.max(leaf.gradient_error(&loss.backward()?, &gradient)?))
    });
    errors.into_iter().fold(0.0, f64::max)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(200) })]
    #[test]
    fn chains_keep_value_and_gradient(
        which in 0usize..3,
        dims in prop::array::uniform2(1usize..7),
        picks in prop::collection::vec(0usize..1000, 5),
    ) {
        prop_assert!(chain([&[3][..], &[2, 2], &[2, 3]][which], dims, picks) <= 1e-11);
    }
}

/// Kinds and numbers of calls, such as `"1 all_gather"`.
fn calls(counts: &comm::CommCounts) -> String {
    counts.iter().map(|(op, c)| format!("{} {op}", c.count)).join(" + ")
}

#[test]
fn one_axis_communicates_what_the_table_says() {
    on_ranks(3, "counts", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let whole = values(&[4, 6], 1, DType::F64);
        let at = Lay::At;
        // From, to, the layout of the matrix that the result is multiplied with, calls forward, calls backward.
        for (from, to, beside, forward, backward) in [
            (at(Shard(0)), Replicate, Replicate, "1 all_gather", ""),
            (at(Shard(0)), Replicate, Shard(1), "1 all_gather", "1 reduce_scatter"),
            (Lay::Varying, Replicate, Shard(1), "", ""),
            (at(Replicate), Replicate, Shard(1), "", "1 all_reduce"),
            (at(SUM), Replicate, Shard(1), "1 all_reduce", "1 all_reduce"),
            (at(Shard(1)), Shard(0), Replicate, "1 all_to_all", "1 all_to_all"),
            (at(Shard(0)), Shard(0), Replicate, "", ""),
            (at(Replicate), Shard(0), Replicate, "", "1 all_gather"),
            (Lay::Varying, Shard(0), Replicate, "", ""),
            (at(Replicate), Replicate, Replicate, "", ""),
            (at(Replicate), SUM, Replicate, "", ""),
            (Lay::Varying, SUM, Replicate, "", ""),
            (at(SUM), Replicate, Replicate, "1 all_reduce", ""),
            (at(SUM), Shard(0), Replicate, "1 reduce_scatter", "1 all_gather"),
            (at(SUM), SUM, Replicate, "", ""),
            (at(Shard(0)), SUM, Replicate, "", ""),
        ] {
            let what = format!("{from} to {to} beside {beside}");
            let leaf = Leaf::new(&whole, &mesh, &[from])?;
            let matrix = values(&[6, 5], 2, DType::F64);
            let beside = distribute(&matrix, &mesh, &[beside])?;
            let (loss, counts) = comm::record(|| leaf.tensor.redistribute(&[to])?.matmul(&beside)?.sum_all());
            assert_eq!(calls(&counts), forward, "{what}, forward");
            let (grads, counts) = comm::record(|| loss?.backward());
            assert_eq!(calls(&counts), backward, "{what}, backward");
            let want = Tensor::ones((4, 5), DType::F64, &Device::Cpu)?.matmul(&matrix.t()?)?;
            assert!(leaf.gradient_error(&grads?, &want)? <= 1e-11, "{what}");
        }
        Ok(())
    });
}

#[test]
fn one_view_serves_many_uses_of_a_gathered_tensor() {
    on_ranks(3, "shared view", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let whole = values(&[4, 6], 1, DType::F64);
        let leaf = Leaf::new(&whole, &mesh, &[Lay::At(Shard(0))])?;
        let matrix = values(&[6, 5], 2, DType::F64);
        let beside = distribute(&matrix, &mesh, &[Shard(1)])?;
        let (loss, counts) = comm::record(|| -> Result<_> {
            let x = leaf.tensor.redistribute(&[Replicate])?;
            let uses = (0..3).map(|_| x.matmul(&beside)?.sum_all()).collect::<Result<Vec<_>>>()?;
            uses[0].add(&uses[1])?.add(&uses[2])
        });
        assert_eq!(calls(&counts), "1 all_gather");
        let (grads, counts) = comm::record(|| loss?.backward());
        assert_eq!(calls(&counts), "1 reduce_scatter");
        let want = (Tensor::ones((4, 5), DType::F64, &Device::Cpu)?.matmul(&matrix.t()?)? * 3.0)?;
        assert!(leaf.gradient_error(&grads?, &want)? <= 1e-11);
        Ok(())
    });
}

#[test]
fn several_axes_communicate_no_more_than_needed() {
    let (s0, s1, s2, r) = (Shard(0), Shard(1), Shard(2), Replicate);
    let cases: Vec<(Vec<Placement>, Vec<Placement>, usize)> = vec![
        (vec![s0, s1], vec![s0, s0], 1),
        (vec![s0, s1], vec![s1, s0], 2),
        (vec![s0, s0], vec![s1, s1], 2),
        (vec![s0, s0], vec![s0, r], 1),
        (vec![s0, s0], vec![r, r], 2),
        (vec![r, r], vec![s0, s0], 0),
        (vec![s0, s0, s0], vec![s1, s1, s1], 3),
        (vec![s0, s1, s0], vec![s1, s0, s0], 3),
        (vec![s0, s1, s2], vec![s2, s1, s0], 2),
        (vec![s1, s0, s0], vec![r, s0, s0], 1),
        (vec![s1, r, s0], vec![r, s0, s0], 2),
        (vec![s0, s0, s1], vec![s0, s1, s2], 2),
    ];
    for (from, to, most) in cases {
        let axes = from.len();
        on_ranks(1 << axes, "several axes", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, &vec![2; axes])?;
            let whole = values(&[8, 8, 8], 4, DType::F32);
            let tensor = distribute(&whole, &mesh, &from)?;
            let (moved, counts) = comm::record(|| tensor.redistribute(&to));
            let what = format!("[{}] to [{}]: {counts}", show(&from), show(&to));
            assert!(counts.total() <= most, "{what}");
            assert_eq!(counts.get(Op::AllReduce).count, 0, "{what}");
            assert_eq!(value_error(&moved?, &whole)?, 0.0, "{what}");
            Ok(())
        });
    }
}

#[test]
fn other_reductions_are_resolved_before_anything_else() {
    use candle_dist::ReduceOp::{Avg, Max, Min, Product};
    for shape in [&[3][..], &[3, 2]] {
        on_ranks(shape.iter().product(), "reductions", move |ctx| -> Result<()> {
            let mesh = mesh(ctx, shape)?;
            let pieces = (0..3).map(|rank| values(&[4, 2], rank, DType::F64)).collect_vec();
            for (op, unit) in [(Avg, 0.0), (Max, -9.0), (Min, 9.0), (Product, 1.0)] {
                let mut at = vec![Replicate; mesh.ndim()];
                at[0] = candle_shard::Partial(op);
                let local = pieces[mesh.coordinate()[0]].clone();
                let tensor = on_device(&DTensor::from_local(local, &mesh, &at, (4, 2))?)?;
                let start = Tensor::full(unit, (4, 2), &Device::Cpu)?;
                let whole = pieces.iter().try_fold(start, |so_far, piece| match op {
                    Max => so_far.maximum(piece),
                    Min => so_far.minimum(piece),
                    Product => so_far * piece,
                    _ => so_far + (piece / 3.0)?,
                })?;
                let what = format!("{op} on {mesh}");
                assert!(distance(&tensor.full_tensor()?, &whole) < 1e-12, "{what}");
                for to in on_axes(&TARGETS, mesh.ndim()) {
                    let moved = tensor.redistribute(&to)?;
                    assert_eq!(moved.placements(), to, "{what}");
                    assert!(value_error(&moved, &whole)? < 1e-12, "{what} to [{}]", show(&to));
                }
                let stream = candle_shard::random::Stream::new(1, "mask");
                let dropped =
                    distribute(&whole, &mesh, &vec![Replicate; mesh.ndim()])?.dropout(0.3, stream)?;
                assert!(
                    value_error(&tensor.dropout(0.3, stream)?, dropped.to_local())? < 1e-12,
                    "{what}, dropout"
                );
                assert!(value_error(&tensor.neg()?, &whole.neg()?)? < 1e-12, "{what}, neg");
                assert!(value_error(&tensor.sum_all()?, &whole.sum_all()?)? < 1e-12, "{what}, sum");
                assert!(
                    value_error(&tensor.reshape(8)?.sqr()?, &whole.reshape(8)?.sqr()?)? < 1e-12,
                    "{what}, reshape"
                );
            }
            Ok(())
        });
    }
}

#[test]
fn whole_numbers_move_unchanged() {
    on_ranks(3, "integers", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let whole = Tensor::arange(0u32, 15, &Device::Cpu)?.reshape((5, 3))?;
        for (from, to) in TARGETS[..3].iter().cartesian_product(&TARGETS[..3]) {
            let tensor = distribute(&whole, &mesh, &[*from])?.redistribute(&[*to])?;
            assert_eq!(value_error(&tensor, &whole)?, 0.0, "{from} to {to}");
        }
        // A share of a whole number is none.
        let tensor = distribute(&whole, &mesh, &[Replicate])?;
        let text = tensor.redistribute(&[SUM]).unwrap_err().to_string();
        assert!(text.contains("u32") && text.contains("P(sum)"), "{text}");
        let halves = on_device(&DTensor::from_local(whole.clone(), &mesh, &[SUM], (5, 3))?)?;
        assert_eq!(value_error(&halves.add(&tensor)?, &(whole * 4.0)?)?, 0.0);
        Ok(())
    });
}
