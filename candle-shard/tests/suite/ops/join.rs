use crate::ops::sweep::{Case, Input, Kind::Float, sweep};
use candle_core::Tensor;
use candle_shard::DTensor;

#[test]
fn cat_and_stack() {
    let mut cases = Vec::new();
    let inputs: [([&[usize]; 2], usize); 5] = [
        ([&[4, 6], &[3, 6]], 0),
        ([&[5, 3], &[5, 2]], 1),
        ([&[1, 7], &[2, 7]], 0),
        ([&[0, 3], &[4, 3]], 0),
        ([&[5], &[2]], 0),
    ];
    for ([a, b], dim) in inputs {
        cases.push(Case::new(
            &format!("cat {dim}"),
            &[(a, Float), (b, Float)],
            move |x| DTensor::cat(x, dim),
            move |x| Tensor::cat(x, dim),
        ));
    }
    let three: [Input; 3] = [(&[5, 3], Float), (&[1, 3], Float), (&[2, 3], Float)];
    cases.extend([
        Case::new("cat of 3", &three, |x| DTensor::cat(x, 0), |x| Tensor::cat(x, 0)),
        Case::new("cat of 1", &three[..1], |x| DTensor::cat(x, 0), |x| Tensor::cat(x, 0)),
        Case::new(
            "cat of one twice, transposed",
            &three[..1],
            |x| DTensor::cat(&[&x[0].t()?, &x[0].t()?], 1),
            |x| Tensor::cat(&[&x[0].t()?, &x[0].t()?], 1),
        ),
    ]);
    let pair: [Input; 2] = [(&[5, 3], Float), (&[5, 3], Float)];
    for dim in 0..3 {
        let name = format!("stack {dim}");
        cases.push(Case::new(&name, &pair, move |x| DTensor::stack(x, dim), move |x| Tensor::stack(x, dim)));
    }
    sweep("cat", cases);
}

#[test]
fn repeated_and_moved_elements() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[1, 7]];
    for shape in shapes {
        let x: [Input; 1] = [(shape, Float)];
        cases.extend([
            Case::new("roll 0 by 2", &x, |x| x[0].roll(2, 0), |x| x[0].roll(2, 0)),
            Case::new("roll 1 by -1", &x, |x| x[0].roll(-1, 1), |x| x[0].roll(-1, 1)),
            Case::new("flip 0", &x, |x| x[0].flip(&[0]), |x| x[0].flip(&[0])),
            Case::new("flip both", &x, |x| x[0].flip(&[1, 0]), |x| x[0].flip(&[1, 0])),
            Case::new("repeat rows", &x, |x| x[0].repeat((2, 1)), |x| x[0].repeat((2, 1))),
            Case::new("repeat in a new dim", &x, |x| x[0].repeat((2, 1, 3)), |x| x[0].repeat((2, 1, 3))),
            Case::new("repeat nothing", &x, |x| x[0].repeat((1, 0)), |x| x[0].repeat((1, 0))),
            Case::new(
                "pad_with_same 0",
                &x,
                |x| x[0].pad_with_same(0, 1, 2),
                |x| x[0].pad_with_same(0, 1, 2),
            ),
            Case::new(
                "pad_with_same 1",
                &x,
                |x| x[0].pad_with_same(1, 0, 1),
                |x| x[0].pad_with_same(1, 0, 1),
            ),
        ]);
    }
    sweep("moved", cases);
}
