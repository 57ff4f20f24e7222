//! The rotary embedding.

use candle_core::{Result, Tensor};
use candle_nn::rotary_emb::{rope_i_slow, rope_slow};
use candle_shard::kernels::{RopePairs, rope};

use crate::kernels::harness::*;

/// The tables of `positions`, in the dtype of `x`.
fn tables(x: &Tensor, positions: usize) -> Result<[Tensor; 2]> {
    let half = x.dims()[x.rank() - 1] / 2;
    let angle = |i: usize| (i / half) as f64 * 0.7 / (1.0 + (i % half) as f64);
    let angles =
        Tensor::from_iter((0..positions * half).map(angle), x.device())?.reshape((positions, half))?;
    Ok([angles.cos()?.to_dtype(x.dtype())?, angles.sin()?.to_dtype(x.dtype())?])
}

/// The fused and the composed form for rows that start at position `offset`.
fn forms(pairs: RopePairs, offset: usize) -> [impl Fn(&[Tensor]) -> Result<Tensor>; 2] {
    [true, false].map(|fused| {
        move |t: &[Tensor]| {
            let x = &t[0];
            let seq = x.dims()[x.rank() - 2];
            // Rounded to 16 bits first, so that both forms see the same tables.
            let [cos, sin] = tables(&x.to_dtype(candle_core::DType::BF16)?, offset + seq + 1)?;
            let [cos, sin] = [cos.to_dtype(x.dtype())?, sin.to_dtype(x.dtype())?];
            if fused {
                return rope(x, &cos, &sin, offset, pairs);
            }
            let [cos, sin] =
                [cos.narrow(0, offset, seq)?.contiguous()?, sin.narrow(0, offset, seq)?.contiguous()?];
            let lead = x.dims()[..x.rank() - 2].iter().product::<usize>();
            let four = x.reshape((1, lead, seq, x.dims()[x.rank() - 1]))?;
            let y = match pairs {
                RopePairs::Halves => rope_slow(&four, &cos, &sin)?,
                RopePairs::Neighbors => rope_i_slow(&four, &cos, &sin)?,
            };
            y.reshape(x.shape())
        }
    })
}

#[test]
fn rope_equals_its_composed_form() {
    for pairs in [RopePairs::Halves, RopePairs::Neighbors] {
        for (dims, offset) in
            [(&[1, 2][..], 0), (&[3, 4], 2), (&[2, 3, 5, 6], 0), (&[2, 1, 7, 34], 3), (&[9, 64, 256], 1)]
        {
            let [fused, composed] = forms(pairs, offset);
            compare(&fused, &composed, &[randn(dims)]);
        }
        differences(&forms(pairs, 1)[0], &[randn(&[2, 3, 4])]);
    }
}

#[test]
fn tables_with_a_gradient_are_refused() {
    let table = candle_core::Var::from_tensor(&randn(&[3, 2])).unwrap();
    let error = rope(&randn(&[3, 4]), &table, &randn(&[3, 2]), 0, RopePairs::Halves).unwrap_err().to_string();
    assert!(error.contains("rope") && error.contains("detach"), "{error}");
}
