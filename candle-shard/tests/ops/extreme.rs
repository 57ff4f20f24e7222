use crate::sweep::{
    Case, Input,
    Kind::{Float, Ids, Whole},
    sweep,
};

/// Shapes that divide, that do not, and that leave ranks without elements.
const SHAPES: [&[usize]; 4] = [&[4, 6], &[5, 3], &[1, 7], &[2, 1, 5]];

#[test]
fn maxima_and_minima_with_equal_elements() {
    let mut cases = Vec::new();
    for shape in SHAPES {
        let x: [Input; 1] = [(shape, Whole)];
        cases.push(Case::new("max_all", &x, |x| x[0].max_all(), |x| x[0].max_all()));
        cases.push(Case::new("min_all", &x, |x| x[0].min_all(), |x| x[0].min_all()));
        for dim in 0..shape.len() {
            cases.extend([
                Case::new(&format!("max {dim}"), &x, move |x| x[0].max(dim), move |x| x[0].max(dim)),
                Case::new(&format!("min {dim}"), &x, move |x| x[0].min(dim), move |x| x[0].min(dim)),
            ]);
        }
    }
    let x: [Input; 1] = [(&[5, 3], Float)];
    let ids: [Input; 1] = [(&[5, 3], Ids(9))];
    cases.extend([
        Case::new("max beside x", &x, |x| x[0].max_keepdim(0)? * &x[0], |x| x[0].max_keepdim(0)?.broadcast_mul(&x[0])),
        Case::new("min beside x", &x, |x| x[0].min_keepdim(1)? * &x[0], |x| x[0].min_keepdim(1)?.broadcast_mul(&x[0])),
        Case::new("max of none", &[(&[0, 3], Float)], |x| x[0].max(1), |x| x[0].sum(1)),
        Case::new("max of one", &[(&[], Float)], |x| x[0].max_all(), |x| x[0].max_all()),
        Case::new("max of ids", &ids, |x| x[0].max(0), |x| x[0].max(0)),
        Case::new("min of ids", &ids, |x| x[0].min(0), |x| x[0].min(0)),
    ]);
    sweep("extremes", cases);
}

#[test]
fn places_of_extremes_with_equal_elements() {
    let mut cases = Vec::new();
    for shape in SHAPES {
        let x: [Input; 1] = [(shape, Whole)];
        for dim in 0..shape.len() {
            cases.extend([
                Case::new(&format!("argmax {dim}"), &x, move |x| x[0].argmax(dim), move |x| x[0].argmax(dim)),
                Case::new(
                    &format!("argmin {dim}"),
                    &x,
                    move |x| x[0].argmin_keepdim(dim),
                    move |x| x[0].argmin_keepdim(dim),
                ),
                Case::new(&format!("argmin without {dim}"), &x, move |x| x[0].argmin(dim), move |x| x[0].argmin(dim)),
            ]);
        }
    }
    sweep("places of extremes", cases);
}

#[test]
fn extremes_that_are_infinite() {
    let cases = vec![
        Case::new(
            "argmax",
            &[(&[5, 3], Whole)],
            |x| x[0].sqr()?.recip()?.argmax(0),
            |x| x[0].sqr()?.recip()?.argmax(0),
        ),
        Case::new(
            "max of minus infinities",
            &[(&[5, 3], Float)],
            |x| x[0].detach().sqr()?.affine(f64::NEG_INFINITY, 0.0)?.max(0)?.exp(),
            |x| x[0].detach().sqr()?.affine(f64::NEG_INFINITY, 0.0)?.max(0)?.exp(),
        ),
        Case::new(
            "argmax of minus infinities",
            &[(&[5, 3], Float)],
            |x| x[0].sqr()?.affine(f64::NEG_INFINITY, 0.0)?.argmax(0),
            |x| x[0].sqr()?.affine(f64::NEG_INFINITY, 0.0)?.argmax(0),
        ),
    ];
    sweep("infinite extremes", cases);
}
