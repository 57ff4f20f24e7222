use crate::sweep::{Case, Input, Kind::Float, sweep};
use candle_core::DType;

#[test]
fn sums_and_means() {
    let shapes: [&[usize]; 5] = [&[4, 6], &[5, 3], &[1, 7], &[2, 1, 5], &[0, 3]];
    let mut cases = Vec::new();
    for shape in shapes {
        let x: [Input; 1] = [(shape, Float)];
        cases.extend([
            Case::new("sum_all", &x, |x| x[0].sum_all(), |x| x[0].sum_all()),
            Case::new("mean_all", &x, |x| x[0].mean_all(), |x| x[0].mean_all()),
        ]);
        for dim in 0..shape.len() {
            cases.extend([
                Case::new(&format!("sum {dim}"), &x, move |x| x[0].sum(dim), move |x| x[0].sum(dim)),
                Case::new(
                    &format!("sum_keepdim {dim}"),
                    &x,
                    move |x| x[0].sum_keepdim(dim),
                    move |x| x[0].sum_keepdim(dim),
                ),
                Case::new(
                    &format!("mean_keepdim {dim}"),
                    &x,
                    move |x| x[0].mean_keepdim(dim),
                    move |x| x[0].mean_keepdim(dim),
                ),
            ]);
        }
    }
    let x: [Input; 1] = [(&[3, 2, 5], Float)];
    cases.extend([
        Case::new("sum (0, 2)", &x, |x| x[0].sum((0, 2)), |x| x[0].sum((0, 2))),
        Case::new(
            "mean_keepdim (1, 2)",
            &x,
            |x| x[0].mean_keepdim((1, 2)),
            |x| x[0].sum_keepdim((1, 2))?.affine(0.1, 0.0),
        ),
        Case::new(
            "square of a sum",
            &x,
            |x| x[0].sum_keepdim(1)?.sqr()?.sub(&x[0]),
            |x| x[0].sum_keepdim(1)?.sqr()?.broadcast_sub(&x[0]),
        ),
    ]);
    sweep("reduce", DType::F64, cases);
}
