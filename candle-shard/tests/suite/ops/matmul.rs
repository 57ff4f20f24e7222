use crate::common::*;
use crate::ops::sweep::{Case, Input, Kind::Float, sweep};
use crate::plain;
use candle_core::{DType, Tensor};
use candle_shard::{DTensor, Result, Shard};
use itertools::Itertools;
use test_utils::on_ranks;

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
        Case::new(
            "matmul",
            &[(a, Float), (b, Float)],
            |x| x[0].matmul(&x[1]),
            |x| x[0].broadcast_matmul(&x[1]),
        )
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

/// Sums of products by broadcasting: each operand gets all indices, in alphabetical order.
fn plain_einsum(inputs: &[&str], output: &str, x: &[Tensor]) -> candle_core::Result<Tensor> {
    let all: Vec<char> = inputs.concat().chars().sorted().dedup().collect();
    let mut product: Option<Tensor> = None;
    for (indices, x) in inputs.iter().zip(x) {
        let own: Vec<char> = indices.chars().collect();
        let order: Vec<usize> =
            all.iter().filter_map(|index| own.iter().position(|other| other == index)).collect();
        let mut x = if order.is_empty() { x.clone() } else { x.permute(order)? };
        for (at, index) in all.iter().enumerate() {
            x = if own.contains(index) { x } else { x.unsqueeze(at)? };
        }
        product = Some(match product {
            Some(product) => product.broadcast_mul(&x)?,
            None => x,
        });
    }
    let gone: Vec<usize> = all.iter().positions(|index| !output.contains(*index)).collect();
    let left: Vec<char> = all.iter().copied().filter(|index| output.contains(*index)).collect();
    let product = product.unwrap().sum(gone)?;
    let order: Vec<usize> =
        output.chars().map(|index| left.iter().position(|other| *other == index).unwrap()).collect();
    if order.is_empty() { Ok(product) } else { product.permute(order) }
}

#[test]
fn sums_of_products() {
    let sizes = |indices: &str, of: &[(char, usize)]| -> &'static [usize] {
        let size = |index| of.iter().find(|(known, _)| *known == index).unwrap().1;
        Vec::leak(indices.chars().map(size).collect())
    };
    let equations = [
        "ij->ji",
        "ij->j",
        "ij->",
        "ij,jk->ik",
        "ij,kj->ik",
        "bij,bjk->bik",
        "i,j->ij",
        "ij,ij->ij",
        "ij,ij->",
        "ij,jk,kl->il",
        "ijk,k->ij",
        "ij,k->i",
        "bqhd,bkhd->bhqk",
        "i,ij,j->",
        "ij,j->ji",
        ",ij->ij",
    ];
    let mut cases = Vec::new();
    for equation in equations {
        let (left, output) = equation.split_once("->").unwrap();
        let inputs: Vec<&str> = left.split(',').collect();
        for of in [[4, 6, 2, 5], [5, 3, 3, 1], [1, 7, 2, 2]] {
            let of: Vec<(char, usize)> = "ijklbqhd".chars().zip(of.into_iter().cycle()).collect();
            let shapes: Vec<Input> = inputs.iter().map(|indices| (sizes(indices, &of), Float)).collect();
            let inputs = inputs.clone();
            cases.push(Case::new(
                equation,
                &shapes,
                move |x| DTensor::einsum(equation, &x.iter().collect::<Vec<_>>()),
                move |x| plain_einsum(&inputs, output, x),
            ));
        }
    }
    let two: [Input; 2] = [(&[2, 5, 3], Float), (&[2, 3, 4], Float)];
    cases.extend([
        Case::new(
            "...ij,...jk->...ik",
            &two,
            |x| DTensor::einsum("...ij, ...jk -> ...ik", &[&x[0], &x[1]]),
            |x| x[0].matmul(&x[1]),
        ),
        Case::new(
            "implicit",
            &two,
            |x| DTensor::einsum("bij,bjk", &[&x[0], &x[1]]),
            |x| x[0].matmul(&x[1])?.sum(0),
        ),
        Case::new(
            "implicit with an ellipsis",
            &two,
            |x| DTensor::einsum("...ij,...jk", &[&x[0], &x[1]]),
            |x| x[0].matmul(&x[1]),
        ),
        Case::new(
            "an ellipsis alone",
            &two[..1],
            |x| DTensor::einsum("i...->...i", &[&x[0]]),
            |x| x[0].permute((1, 2, 0)),
        ),
        Case::new(
            "nothing inside",
            &[(&[4, 0], Float), (&[0, 5], Float)],
            |x| DTensor::einsum("ij,jk->ik", &[&x[0], &x[1]]),
            |x| x[0].sum_keepdim(1)?.broadcast_mul(&x[1].sum_keepdim(0)?),
        ),
    ]);
    sweep("einsum", cases);
}

#[test]
fn equations_that_do_not_fit_are_refused() {
    on_ranks(2, "einsum", |ctx| -> Result<()> {
        let mesh = mesh(ctx, &[2])?;
        let x = distribute(&values(&[4, 3], 1, DType::F64), &mesh, &[Shard(0)])?;
        let half = x.to_dtype(DType::F32)?;
        let whole = x.to_dtype(DType::I64)?;
        for (equation, operands, text) in [
            ("ij,jk->ik", &[&x, &x][..], "index 'j' has size 3, and 4"),
            ("ij->ik", &[&x], "index 'k' of the result is in no operand"),
            ("ii->i", &[&x], "index 'i' is twice"),
            ("ij->ii", &[&x], "index 'i' is twice"),
            ("ijk->i", &[&x], "the term \"ijk\" for operand 0 of 2 dims"),
            ("i->i", &[&x], "the term \"i\" for operand 0 of 2 dims"),
            ("ij,ij->i", &[&x], "2 terms for 1 operands"),
            ("i1->i", &[&x], "an index is a letter"),
            ("ij...k...->i", &[&x], "for operand 0"),
            ("", &[], "0 operands"),
            ("ij,ij->ij", &[&x, &half], "convert one with to_dtype"),
            ("ij->ij", &[&whole], "holds no floats"),
        ] {
            let error = DTensor::einsum(equation, operands).unwrap_err().to_string();
            assert!(error.starts_with("einsum: ") && error.contains(text), "{equation}: {error}");
        }
        Ok(())
    });
}
