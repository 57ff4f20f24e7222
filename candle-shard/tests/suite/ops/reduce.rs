use crate::ops::sweep::{Case, Input, Kind::Float, sweep};
use crate::plain;

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
    sweep("reduce", cases);
}

#[test]
fn means_variances_and_norms() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 4] = [&[4, 6], &[5, 3], &[2, 7], &[2, 2, 5]];
    for shape in shapes {
        let x: [Input; 1] = [(shape, Float)];
        cases.push(Case::new("norm", &x, |x| x[0].norm(), |x| x[0].norm()));
        for dim in 0..shape.len() {
            cases.extend([
                Case::new(&format!("mean {dim}"), &x, move |x| x[0].mean(dim), move |x| x[0].mean(dim)),
                Case::new(&format!("var {dim}"), &x, move |x| x[0].var(dim), move |x| x[0].var(dim)),
                Case::new(
                    &format!("standardized {dim}"),
                    &x,
                    move |x| &x[0] / (x[0].var_keepdim(dim)? + 1.0)?.sqrt(),
                    move |x| x[0].broadcast_div(&(x[0].var_keepdim(dim)? + 1.0)?.sqrt()?),
                ),
            ]);
        }
    }
    let x: [Input; 1] = [(&[3, 2, 5], Float)];
    cases.push(Case::new("mean (0, 2)", &x, |x| x[0].mean((0, 2)), |x| x[0].mean((0, 2))));
    cases.push(Case::new("var of one", &[(&[1, 3], Float)], |x| x[0].var(0), |x| x[0].var(0)));
    sweep("moments", cases);
}

#[test]
fn running_sums() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 5] = [&[4, 6], &[5, 3], &[1, 7], &[2, 3, 5], &[6]];
    for shape in shapes {
        for dim in 0..shape.len() {
            cases.push(Case::new(
                &format!("cumsum {dim}"),
                &[(shape, Float)],
                move |x| x[0].cumsum(dim),
                move |x| plain::cumsum(&x[0], dim),
            ));
        }
    }
    cases.push(Case::new("cumsum of none", &[(&[0, 3], Float)], |x| x[0].cumsum(1), |x| Ok(x[0].clone())));
    sweep("cumsum", cases);
}
