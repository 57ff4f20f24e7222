use crate::common::*;
use crate::ops::sweep::{Case, Input, Kind::Float, Kind::Whole, sweep};
use crate::plain;
use candle_core::{DType, Device, Tensor, Var};
use candle_shard::{DTensor, Result, Shard, Spec};
use itertools::Itertools;
use test_utils::{OpCheck, on_ranks};

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
    let none: [Input; 1] = [(&[0, 3], Float)];
    cases.push(Case::new("logcumsumexp of none", &none, |x| x[0].logcumsumexp(1), |x| Ok(x[0].clone())));
    sweep("cumsum", cases);
}

#[test]
fn running_log_sums() {
    OpCheck::new("logcumsumexp")
        .tensor("x", &[&[4, 6], &[5, 3], &[1, 7]], Float)
        .plain("dim", &[0usize, 1])
        .sweep(
            |a| a["x"].logcumsumexp(*a.get_value::<usize>("dim")),
            |a| plain::logcumsumexp(&a["x"], *a.get_value("dim")),
        );
}

/// Shards of -∞ add nothing, and what comes behind them is finite.
#[test]
fn running_log_sums_begin_with_nothing() {
    let none = f64::NEG_INFINITY;
    on_ranks(3, "nothing", move |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[3])?;
        let row = Tensor::new(&[none, none, 1.0, none, -2.0, 0.5], &Device::Cpu)?;
        let (x, var) = distribute(&row, &mesh, &[Shard(0)])?.to_var()?;
        let y = x.logcumsumexp(0)?;
        let whole = y.full_tensor()?.to_vec1::<f64>()?;
        assert_eq!(whole[..4], [none, none, 1.0, 1.0]);
        let sum = [1.0, -2.0, 0.5].map(f64::exp).iter().sum::<f64>();
        assert!((whole[5] - sum.ln()).abs() < 1e-12, "{whole:?}");
        let grads = y.narrow(0, 5, 1)?.sum_all()?.backward()?;
        let got = DTensor::from_local_with_spec(grads.get(&var).unwrap().clone(), x.spec().clone())?;
        let got = got.full_tensor()?.to_vec1::<f64>()?;
        let want = [none, none, 1.0, none, -2.0, 0.5].map(|x: f64| x.exp() / sum);
        assert!(got.iter().zip(want).all(|(got, want)| (got - want).abs() < 1e-12), "{got:?} for {want:?}");
        Ok(())
    });
}

/// The product over a dim, element by element.
fn plain_prod(x: &Tensor, dim: usize) -> candle_core::Result<Tensor> {
    let mut product = x.narrow(dim, 0, 1)?;
    for at in 1..x.dim(dim)? {
        product = (product * x.narrow(dim, at, 1)?)?;
    }
    Ok(product)
}

#[test]
fn products() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 5] = [&[4, 6], &[5, 3], &[1, 7], &[2, 1, 5], &[3, 2, 4]];
    for (shape, kind) in shapes.into_iter().cartesian_product([Float, Whole]) {
        let x: [Input; 1] = [(shape, kind)]; // whole numbers are often 0
        for dim in 0..shape.len() {
            cases.extend([
                Case::new(
                    &format!("prod {dim}"),
                    &x,
                    move |x| x[0].prod(dim),
                    move |x| plain_prod(&x[0].affine(1.0, 0.0)?, dim)?.squeeze(dim),
                ),
                Case::new(
                    &format!("prod_keepdim {dim}"),
                    &x,
                    move |x| x[0].sqr()?.prod_keepdim(dim)?.mul(&x[0]),
                    move |x| plain_prod(&x[0].sqr()?, dim)?.broadcast_mul(&x[0]),
                ),
            ]);
        }
        cases.push(Case::new(
            "prod_all",
            &x,
            |x| x[0].prod_all(),
            |x| plain_prod(&x[0].flatten_all()?, 0)?.squeeze(0),
        ));
    }
    sweep("products", cases);
}

#[test]
fn deviations() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 4] = [&[4, 6], &[5, 3], &[2, 7], &[2, 2, 5]];
    for shape in shapes {
        let x: [Input; 1] = [(shape, Float)];
        for dim in 0..shape.len() {
            cases.extend([
                Case::new(&format!("std {dim}"), &x, move |x| x[0].std(dim), move |x| x[0].var(dim)?.sqrt()),
                Case::new(
                    &format!("std_keepdim {dim}"),
                    &x,
                    move |x| x[0].div(x[0].std_keepdim(dim)?),
                    move |x| x[0].broadcast_div(&x[0].var_keepdim(dim)?.sqrt()?),
                ),
            ]);
        }
    }
    sweep("deviations", cases);
}

#[test]
fn truths() {
    let mut cases = Vec::new();
    let shapes: [&[usize]; 5] = [&[4, 6], &[5, 3], &[1, 7], &[2, 1, 5], &[2, 2]];
    let of = |x: &Tensor, dim, all: bool| {
        let set = x.ne(0.0)?;
        let made = if all { set.min_keepdim(dim)? } else { set.max_keepdim(dim)? };
        made.to_dtype(x.dtype())
    };
    for shape in shapes {
        let x: [Input; 1] = [(shape, Whole)];
        let float = |x: DTensor, like: &DTensor| x.to_dtype(like.dtype());
        for dim in 0..shape.len() {
            cases.extend([
                Case::new(
                    &format!("any {dim}"),
                    &x,
                    move |x| float(x[0].any(dim)?, &x[0]),
                    move |x| of(&x[0], dim, false)?.squeeze(dim),
                ),
                Case::new(
                    &format!("all {dim}"),
                    &x,
                    move |x| float(x[0].all(dim)?, &x[0]),
                    move |x| of(&x[0], dim, true)?.squeeze(dim),
                ),
                Case::new(
                    &format!("any_keepdim {dim}"),
                    &x,
                    move |x| float(x[0].any_keepdim(dim)?, &x[0])?.mul(&x[0]),
                    move |x| of(&x[0], dim, false)?.broadcast_mul(&x[0]),
                ),
                Case::new(
                    &format!("all_keepdim {dim}"),
                    &x,
                    move |x| float(x[0].all_keepdim(dim)?, &x[0])?.mul(&x[0]),
                    move |x| of(&x[0], dim, true)?.broadcast_mul(&x[0]),
                ),
            ]);
        }
        cases.extend([
            Case::new(
                "any_all",
                &x,
                move |x| float(x[0].any_all()?, &x[0]),
                move |x| of(&x[0].flatten_all()?, 0, false)?.squeeze(0),
            ),
            Case::new(
                "all_all",
                &x,
                move |x| float(x[0].all_all()?, &x[0]),
                move |x| of(&x[0].flatten_all()?, 0, true)?.squeeze(0),
            ),
        ]);
    }
    sweep("truths", cases);
}

#[test]
fn products_over_shards_of_given_sizes() {
    on_ranks(2, "sizes", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        for (len, sizes) in [(2, [0, 2]), (2, [2, 0]), (2, [1, 1]), (5, [1, 4]), (3, [0, 3])] {
            let whole = values(&[3, len], 1, DType::F64);
            let spec = Spec::new(&mesh, &[Shard(1)], whole.shape(), DType::F64)?
                .with_sizes(0, Some(sizes[..].into()))?;
            let leaf = Leaf::with_spec(&whole, spec, &[Lay::At(Shard(1))])?;
            let made = leaf.tensor.prod(1)?;
            let var = Var::from_tensor(&whole)?;
            let want = plain_prod(&var, 1)?;
            assert!(value_error(&made, &want.detach().squeeze(1)?)? < 1e-12, "{sizes:?}");
            let want = want.sum_all()?.backward()?.remove(&var).unwrap();
            assert!(leaf.gradient_error(&made.sum_all()?.backward()?, &want)? < 1e-12, "{sizes:?}");
        }
        Ok(())
    });
}
