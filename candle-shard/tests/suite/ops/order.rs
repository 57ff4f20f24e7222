use crate::ops::sweep::{
    Case, Input,
    Kind::{Float, Ids, Whole},
    sweep,
};
use candle_core::{D, DType, Tensor};

fn plain_topk(x: &Tensor, k: usize) -> candle_core::Result<(Tensor, Tensor)> {
    let (values, places) = x.contiguous()?.sort_last_dim(false)?;
    Ok((values.narrow(D::Minus1, 0, k)?, places.narrow(D::Minus1, 0, k)?))
}

#[test]
fn sorting() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 3] = [&[4, 6], &[5, 3], &[1, 7]];
    for shape in shapes {
        let (x, whole): ([Input; 1], [Input; 1]) = ([(shape, Float)], [(shape, Whole)]);
        cases.extend([
            Case::new("sort up", &x, |x| Ok(x[0].sort_last_dim(true)?.0), |x| Ok(x[0].sort_last_dim(true)?.0)),
            Case::new("sort down", &x, |x| Ok(x[0].sort_last_dim(false)?.0), |x| Ok(x[0].sort_last_dim(false)?.0)),
            Case::new("indices", &whole, |x| x[0].arg_sort_last_dim(false), |x| x[0].arg_sort_last_dim(false)),
        ]);
    }
    cases.push(Case::new("of none", &[(&[3, 0], Float)], |x| Ok(x[0].sort_last_dim(true)?.0), |x| Ok(x[0].clone())));
    sweep("sort", cases);
}

#[test]
fn the_largest() {
    let mut cases = Vec::new();
    // With few ranks the pieces are asked for candidates, with many the dim is gathered; small pieces have fewer.
    for (shape, k) in [(&[2, 17][..], 2), (&[3, 10], 3), (&[9], 1), (&[2, 5], 5), (&[2, 4], 0), (&[0, 9], 2)] {
        let (x, whole): ([Input; 1], [Input; 1]) = ([(shape, Float)], [(shape, Whole)]);
        cases.extend([
            Case::new(&format!("top {k}"), &x, move |x| Ok(x[0].topk(k)?.0), move |x| Ok(plain_topk(&x[0], k)?.0)),
            Case::new(
                &format!("places of top {k}"),
                &whole,
                move |x| x[0].topk(k)?.1.to_dtype(DType::F64),
                move |x| plain_topk(&x[0], k)?.1.to_dtype(DType::F64),
            ),
        ]);
    }
    cases.push(Case::new(
        "ids, most of them 0",
        &[(&[2, 17], Ids(2))],
        |x| x[0].topk(2)?.1.to_dtype(DType::F64),
        |x| plain_topk(&x[0], 2)?.1.to_dtype(DType::F64),
    ));
    sweep("topk", cases);
}
