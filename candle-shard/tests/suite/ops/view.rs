use crate::ops::sweep::{Case, Input, Kind::Float, sweep};
use candle_core::{D, Tensor};
use candle_shard::DTensor;

#[test]
fn permutations() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[1, 7]];
    for shape in shapes {
        let x: [Input; 1] = [(shape, Float)];
        cases.push(Case::new("t", &x, |x| x[0].t(), |x| x[0].t()));
        cases.push(Case::new("t then t", &x, |x| x[0].t()?.t(), |x| x[0].t()?.t()));
    }
    let x: [Input; 1] = [(&[2, 3, 5], Float)];
    cases.push(Case::new("transpose", &x, |x| x[0].transpose(0, 2), |x| x[0].transpose(0, 2)));
    cases.push(Case::new("permute", &x, |x| x[0].permute((2, 0, 1)), |x| x[0].permute((2, 0, 1))));
    cases.push(Case::new("permute all same", &x, |x| x[0].permute((0, 1, 2)), |x| x[0].permute((0, 1, 2))));
    sweep("permute", cases);
}

#[test]
fn dims_of_size_one_and_flat_dims() {
    let x: [Input; 1] = [(&[3, 1, 5], Float)];
    let flat: [Input; 1] = [(&[5, 2, 3], Float)];
    let cases = vec![
        Case::new("squeeze", &x, |x| x[0].squeeze(1), |x| x[0].squeeze(1)),
        Case::new("squeeze nothing", &x, |x| x[0].squeeze(0), |x| x[0].squeeze(0)),
        Case::new("unsqueeze", &x, |x| x[0].unsqueeze(0), |x| x[0].unsqueeze(0)),
        Case::new("unsqueeze the last", &x, |x| x[0].unsqueeze(D::Minus1), |x| x[0].unsqueeze(D::Minus1)),
        Case::new("flatten", &flat, |x| x[0].flatten(1, 2), |x| x[0].flatten(1, 2)),
        Case::new("flatten_to", &flat, |x| x[0].flatten_to(1), |x| x[0].flatten_to(1)),
        Case::new("flatten_from", &flat, |x| x[0].flatten_from(D::Minus2), |x| x[0].flatten_from(D::Minus2)),
        Case::new("flatten_all", &flat, |x| x[0].flatten_all(), |x| x[0].flatten_all()),
        Case::new("flatten_all", &[(&[], Float)], |x| x[0].flatten_all(), |x| x[0].flatten_all()),
        Case::new("a hole", &flat, |x| x[0].reshape((5, ())), |x| x[0].reshape((5, ()))),
        Case::new("transpose", &flat, |x| x[0].transpose(D::Minus1, 0), |x| x[0].transpose(D::Minus1, 0)),
        Case::new(
            "contiguous",
            &flat,
            |x| x[0].transpose(0, 1)?.contiguous(),
            |x| x[0].transpose(0, 1)?.contiguous(),
        ),
    ];
    sweep("small views", cases);
}

#[test]
fn repeated_views() {
    let case = |(from, to): (&'static [usize], &'static [usize])| {
        let name = format!("broadcast_as {to:?} of");
        Case::new(&name, &[(from, Float)], move |x| x[0].broadcast_as(to), move |x| x[0].broadcast_as(to))
    };
    let shapes: [(&[usize], &[usize]); 7] = [
        (&[5, 1], &[5, 3]),
        (&[1, 3], &[4, 3]),
        (&[3], &[2, 5, 3]),
        (&[1, 1], &[1, 5]),
        (&[], &[2, 3]),
        (&[1, 3], &[0, 3]),
        (&[5, 3], &[5, 3]),
    ];
    let mut cases = shapes.map(case).to_vec();
    cases.push(Case::new(
        "expand",
        &[(&[5, 1], Float)],
        |x| x[0].expand((2, 5, 4)),
        |x| x[0].expand((2, 5, 4)),
    ));
    let left = Case::new("left", &[(&[5, 3], Float)], |x| x[0].broadcast_left(2), |x| x[0].broadcast_left(2));
    cases.push(left);
    sweep("broadcast_as", cases);
}

/// From and to: heads split and merged, everything flattened and back, sizes that divide by nothing, dims of size 1.
const RESHAPES: [[&[usize]; 2]; 32] = [
    [&[0, 6], &[0, 2, 3]],
    [&[2, 0, 3], &[6, 0]],
    [&[2, 3, 8], &[2, 3, 4, 2]],
    [&[2, 3, 4, 2], &[2, 3, 8]],
    [&[2, 3, 6], &[2, 3, 3, 2]],
    [&[5, 6], &[5, 2, 3]],
    [&[5, 2, 3], &[5, 6]],
    [&[4, 6], &[24]],
    [&[24], &[4, 6]],
    [&[5, 3], &[15]],
    [&[15], &[5, 3]],
    [&[15], &[3, 5]],
    [&[5, 3], &[3, 5]],
    [&[4, 6], &[6, 4]],
    [&[8, 3], &[4, 6]],
    [&[4, 6], &[8, 3]],
    [&[2, 2, 6], &[4, 6]],
    [&[4, 6], &[2, 2, 6]],
    [&[2, 3, 5], &[6, 5]],
    [&[6, 5], &[3, 2, 5]],
    [&[4, 6], &[1, 4, 6]],
    [&[4, 6], &[4, 1, 6]],
    [&[4, 6], &[4, 6, 1]],
    [&[1, 4, 1, 6], &[4, 6]],
    [&[1, 6], &[6]],
    [&[6], &[1, 6, 1]],
    [&[1, 1], &[1]],
    [&[1], &[]],
    [&[], &[1, 1]],
    [&[1, 7], &[7, 1]],
    [&[2, 1, 3], &[3, 1, 2]],
    [&[12], &[2, 2, 3]],
];

#[test]
fn reshape() {
    let case = |[from, to]: [&'static [usize]; 2]| {
        let name = format!("reshape to {to:?} from");
        Case::new(&name, &[(from, Float)], move |x| x[0].reshape(to), move |x| x[0].reshape(to))
    };
    sweep("reshape", RESHAPES.map(case).to_vec());
}

#[test]
fn chains_of_reshapes_with_ops_between() {
    let x: [Input; 1] = [(&[3, 5, 4], Float)];
    let cases = vec![
        Case::new(
            "split heads, swap, merge",
            &x,
            |x| x[0].reshape((3, 5, 2, 2))?.transpose(1, 2)?.tanh()?.transpose(1, 2)?.reshape((3, 5, 4)),
            |x| x[0].reshape((3, 5, 2, 2))?.transpose(1, 2)?.tanh()?.transpose(1, 2)?.reshape((3, 5, 4)),
        ),
        Case::new(
            "rows of a batch",
            &x,
            |x| x[0].reshape((15, 4))?.sqr()?.matmul(&x[0].reshape((4, 15))?)?.reshape((3, 5, 15)),
            |x| x[0].reshape((15, 4))?.sqr()?.matmul(&x[0].reshape((4, 15))?)?.reshape((3, 5, 15)),
        ),
        Case::new(
            "flat and unlike before",
            &x,
            |x| x[0].reshape(60)?.add(&x[0].transpose(0, 1)?.reshape(60)?)?.reshape((12, 5)),
            |x| x[0].reshape(60)?.add(&x[0].transpose(0, 1)?.reshape(60)?)?.reshape((12, 5)),
        ),
    ];
    sweep("reshape chains", cases);
}

#[test]
fn grids_of_coordinates() {
    let inputs: [Input; 3] = [(&[4], Float), (&[3], Float), (&[5], Float)];
    let case = |at: usize, xy: bool| {
        let name = format!("meshgrid {at} {xy}");
        let here = move |x: &[DTensor]| Ok(DTensor::meshgrid(x, xy)?.remove(at));
        Case::new(&name, &inputs, here, move |x| Ok(Tensor::meshgrid(x, xy)?.remove(at)))
    };
    sweep("meshgrid", (0..3).flat_map(|at| [case(at, false), case(at, true)]).collect());
}
