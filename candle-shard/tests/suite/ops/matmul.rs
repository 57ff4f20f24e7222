use crate::ops::sweep::{Case, Input, Kind::Float, sweep};
use crate::plain;

const PRODUCTS: [[&[usize]; 2]; 12] = [
    [&[0, 3], &[3, 2]],
    [&[4, 0], &[0, 2]],
    [&[4, 6], &[6, 2]],
    [&[5, 3], &[3, 7]],
    [&[1, 2], &[2, 1]],
    [&[2, 4, 3], &[2, 3, 5]],
    [&[3, 1, 2], &[3, 2, 5]],
    [&[5, 2, 3], &[3, 2]],
    [&[2, 3], &[5, 3, 1]],
    [&[2, 1, 2, 3], &[3, 3, 2]],
    [&[1, 2, 3], &[4, 3, 2]],
    [&[5, 1], &[1, 3]],
];

#[test]
fn matmul() {
    let product = |[a, b]: [&'static [usize]; 2]| {
        Case::new("matmul", &[(a, Float), (b, Float)], |x| x[0].matmul(&x[1]), |x| x[0].broadcast_matmul(&x[1]))
    };
    sweep("matmul", PRODUCTS.map(product).to_vec());
}

#[test]
fn matmul_of_transposed_views() {
    let inputs: [Input; 2] = [(&[2, 5, 3], Float), (&[2, 4, 3], Float)];
    let cases = vec![
        Case::new("x yᵀ", &inputs, |x| x[0].matmul(&x[1].t()?), |x| x[0].matmul(&x[1].t()?)),
        Case::new("xᵀ x", &inputs[..1], |x| x[0].t()?.matmul(&x[0]), |x| x[0].t()?.matmul(&x[0])),
        Case::new(
            "heads",
            &[(&[2, 3, 4, 5], Float)],
            |x| x[0].transpose(1, 2)?.matmul(&x[0].permute((0, 2, 3, 1))?),
            |x| x[0].transpose(1, 2)?.contiguous()?.matmul(&x[0].permute((0, 2, 3, 1))?.contiguous()?),
        ),
    ];
    sweep("matmul of views", cases);
}

#[test]
fn products_of_vectors() {
    let mut cases = Vec::new();
    let shapes: [[&[usize]; 2]; 4] = [[&[4, 6], &[6]], [&[5, 3], &[3]], [&[1, 7], &[7]], [&[3, 1], &[1]]];
    for [matrix, vector] in shapes {
        cases.extend([
            Case::new("mv", &[(matrix, Float), (vector, Float)], |x| x[0].mv(&x[1]), |x| x[0].mv(&x[1])),
            Case::new("dot", &[(vector, Float), (vector, Float)], |x| x[0].dot(&x[1]), |x| x[0].dot(&x[1])),
        ]);
    }
    sweep("vectors", cases);
}

#[test]
fn linear() {
    let shapes: [[&[usize]; 3]; 6] = [
        [&[0, 3], &[2, 3], &[2]],
        [&[4, 6], &[2, 6], &[2]],
        [&[5, 3], &[7, 3], &[7]],
        [&[1, 2], &[5, 2], &[5]],
        [&[2, 3, 4], &[5, 4], &[5]],
        [&[3, 1, 1], &[2, 1], &[2]],
    ];
    let with_bias = |[x, w, b]: [&'static [usize]; 3]| {
        let inputs = [(x, Float), (w, Float), (b, Float)];
        Case::new("linear with bias", &inputs, |x| x[0].linear(&x[1], Some(&x[2])), plain::linear)
    };
    let without = |[x, w, _]: [&'static [usize]; 3]| {
        Case::new("linear", &[(x, Float), (w, Float)], |x| x[0].linear(&x[1], None), plain::linear)
    };
    sweep("linear", shapes.map(with_bias).into_iter().chain(shapes.map(without)).collect());
}
