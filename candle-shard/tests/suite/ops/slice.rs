use crate::common::*;
use crate::ops::sweep::{Case, Input, Kind::Float, sweep};
use crate::plain;
use candle_core::{D, DType, IndexOp, Tensor};
use candle_dist::comm;
use candle_shard::{DTensor, Replicate, Result, Shard};
use itertools::Itertools;
use test_utils::on_ranks;

#[test]
fn narrow() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[2, 7, 1]];
    for shape in shapes {
        for (dim, &size) in shape.iter().enumerate() {
            for (start, len) in
                [(0, size), (size / 2, size - size / 2), (0, size.div_ceil(2)), (size / 3, 1), (1, 0)]
            {
                let name = format!("narrow {dim} {start}..{}", start + len);
                let inputs = [(shape, Float)];
                let case = Case::new(
                    &name,
                    &inputs,
                    move |x| x[0].narrow(dim, start, len),
                    move |x| x[0].narrow(dim, start, len),
                );
                cases.push(case);
            }
        }
    }
    sweep("narrow", cases);
}

#[test]
fn shift() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 4] = [&[4, 6], &[5, 3], &[2, 7, 1], &[1, 4]];
    for shape in shapes {
        for dim in 0..shape.len() {
            for by in [1, -1, 3, -2, 7, isize::MAX, isize::MIN] {
                let inputs = [(shape, Float)];
                let distributed = move |x: &[DTensor]| x[0].shift(dim, by);
                cases.push(Case::new(&format!("shift {dim} {by}"), &inputs, distributed, move |x| {
                    plain::shift(&x[0], dim, by)
                }));
            }
        }
    }
    sweep("shift", cases);
}

#[test]
fn parts_of_parts_and_their_uses() {
    let x: [Input; 1] = [(&[7, 3], Float)];
    let cases = vec![
        Case::new(
            "neighbors",
            &x,
            |x| x[0].narrow(0, 1, 6)?.sub(&x[0].narrow(0, 0, 6)?),
            |x| x[0].narrow(0, 1, 6)? - x[0].narrow(0, 0, 6)?,
        ),
        Case::new(
            "a part of a part",
            &x,
            |x| x[0].narrow(0, 2, 5)?.narrow(0, 1, 3)?.sqr()?.t(),
            |x| x[0].narrow(0, 2, 5)?.narrow(0, 1, 3)?.sqr()?.t(),
        ),
        Case::new(
            "the last chunk",
            &x,
            |x| x[0].chunk(3, 0)?[2].matmul(&x[0].t()?),
            |x| x[0].chunk(3, 0)?[2].matmul(&x[0].t()?),
        ),
        Case::new(
            "more chunks than rows",
            &x,
            |x| Ok(x[0].chunk(9, 1)?.remove(2)),
            |x| Ok(x[0].chunk(9, 1)?.remove(2)),
        ),
        Case::new("get", &x, |x| x[0].get(4), |x| x[0].get(4)),
        Case::new("get_on_dim", &x, |x| x[0].get_on_dim(D::Minus1, 2), |x| x[0].get_on_dim(D::Minus1, 2)),
    ];
    sweep("parts", cases);
}

#[test]
fn indexes_as_of_candle() {
    type Indexed =
        (&'static str, fn(&DTensor) -> Result<DTensor>, fn(&Tensor) -> candle_core::Result<Tensor>);
    const INDEXES: [Indexed; 9] = [
        ("a number", |x| x.i(1), |x| x.i(1)),
        ("a range", |x| x.i(1..), |x| x.i(1..)),
        ("an end", |x| x.i(..=1), |x| x.i(..=1)),
        ("all", |x| x.i(..), |x| x.i(..)),
        ("a number and a range", |x| x.i((1, 1..3)), |x| x.i((1, 1..3))),
        ("two numbers", |x| x.i((0, 2)), |x| x.i((0, 2))),
        ("a number behind a range", |x| x.i((.., 2)), |x| x.i((.., 2))),
        ("places", |x| x.i(&[1u32, 0, 1][..]), |x| x.i(&[1u32, 0, 1][..])),
        ("places behind a number", |x| x.i((1, vec![2u32, 0])), |x| x.i((1, vec![2u32, 0]))),
    ];
    let mut cases = Vec::new();
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[2, 3, 5]];
    for (shape, (name, distributed, plain)) in shapes.into_iter().cartesian_product(INDEXES) {
        cases.push(Case::new(name, &[(shape, Float)], move |x| distributed(&x[0]), move |x| plain(&x[0])));
    }
    sweep("i", cases);
}

#[test]
fn windows_of_a_dim() {
    let mut cases = Vec::new();
    let windows: [(&[usize], usize, usize); 4] =
        [(&[4, 6], 2, 2), (&[5, 7], 3, 1), (&[2, 3, 5], 2, 3), (&[9], 2, 3)];
    for (shape, size, step) in windows {
        for dim in 0..shape.len() {
            cases.push(Case::new(
                &format!("unfold {dim} by {size}, {step}"),
                &[(shape, Float)],
                move |x| x[0].unfold(dim, size, step),
                move |x| plain::unfold(&x[0], dim, size, step),
            ));
        }
    }
    sweep("unfold", cases);
}

#[test]
fn zeros_around() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[0, 3]];
    for shape in shapes {
        for dim in 0..2 {
            for (left, right) in [(0, 0), (1, 2), (0, 3), (2, 0)] {
                cases.push(Case::new(
                    &format!("pad_with_zeros {dim} {left} {right}"),
                    &[(shape, Float)],
                    move |x| x[0].pad_with_zeros(dim, left, right),
                    move |x| x[0].pad_with_zeros(dim, left, right),
                ));
            }
        }
    }
    let back = |x: &Tensor| x.pad_with_zeros(0, 1, 1)?.narrow(0, 0, 5)?.sqr();
    let case = Case::new(
        "pad and cut",
        &[(&[5, 3], Float)],
        |x| x[0].pad_with_zeros(0, 1, 1)?.narrow(0, 0, 5)?.sqr(),
        move |x| back(&x[0]),
    );
    cases.push(case);
    sweep("pad_with_zeros", cases);
}

#[test]
fn slices_in_place() {
    let mut cases = Vec::new();
    let inputs: [([&[usize]; 2], usize, usize); 6] = [
        ([&[4, 6], &[2, 6]], 0, 1),
        ([&[5, 3], &[1, 3]], 0, 4),
        ([&[5, 3], &[5, 2]], 1, 0),
        ([&[5, 3], &[5, 3]], 0, 0),
        ([&[5, 3], &[0, 3]], 0, 2),
        ([&[2, 1, 3], &[2, 1, 1]], 2, 1),
    ];
    for ([base, part], dim, start) in inputs {
        cases.push(Case::new(
            &format!("slice_scatter {dim} {start}"),
            &[(base, Float), (part, Float)],
            move |x| x[0].slice_scatter(&x[1], dim, start),
            move |x| x[0].slice_scatter(&x[1], dim, start),
        ));
    }
    cases.extend([
        Case::new(
            "slice_assign",
            &[(&[5, 4], Float), (&[2, 3], Float)],
            |x| x[0].slice_assign(&[1..3, 0..3], &x[1]),
            |x| x[0].slice_assign(&[1..3, 0..3], &x[1]),
        ),
        Case::new(
            "slice_assign all",
            &[(&[5, 3], Float), (&[5, 3], Float)],
            |x| x[0].slice_assign(&[.., ..], &x[1]),
            |x| x[0].slice_assign(&[.., ..], &x[1]),
        ),
    ]);
    sweep("slice_scatter", cases);
}

#[test]
fn parts_of_a_sharded_dim_stay_where_they_are() {
    on_ranks(4, "parts", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[4])?;
        let leaf = Leaf::new(&values(&[8, 3], 1, DType::F64), &mesh, &[Lay::At(Shard(0))])?;
        let row = DTensor::distribute(&values(&[1, 3], 2, DType::F64), &mesh, &[Replicate])?;
        let (made, counts) = comm::record(|| -> Result<DTensor> {
            let part = leaf.tensor.narrow(0, 3, 4)?.pad_with_zeros(0, 1, 0)?.slice_scatter(&row, 0, 2)?;
            part.sqr()?.sum_all()?.backward()?;
            Ok(part)
        });
        let made = made?;
        assert_eq!(counts.total(), 0, "{counts}");
        assert_eq!(made.spec().sizes(0).map(|sizes| sizes.to_vec()), Some(vec![1, 1, 2, 1]));
        Ok(())
    });
}
