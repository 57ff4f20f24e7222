//! Attention in one piece.

use candle_core::{D, Device::Cpu, Result, Tensor};
use candle_shard::kernels::flash_attn;

use crate::kernels::harness::*;

const SCALE: f64 = 0.4;

pub(crate) fn fused_flash(t: &[Tensor]) -> Result<Tensor> {
    flash_attn(&t[0], &t[1], &t[2], SCALE, false)
}

pub(crate) fn fused_causal_flash(t: &[Tensor]) -> Result<Tensor> {
    flash_attn(&t[0], &t[1], &t[2], SCALE, true)
}

/// The definition, head by head.
fn composed(t: &[Tensor], causal: bool) -> Result<Tensor> {
    let (heads, groups) = (t[0].dim(2)?, t[1].dim(2)?);
    let (q, k) = (t[0].dim(1)?, t[1].dim(1)?);
    let hidden = |i: usize, j: usize| if causal && j + q > i + k { f64::NEG_INFINITY } else { 0.0 };
    let mask =
        Tensor::from_iter((0..q).flat_map(|i| (0..k).map(move |j| hidden(i, j))), &Cpu)?.reshape((q, k))?;
    let head = |h: usize| {
        let at = |t: &Tensor, h: usize| t.narrow(2, h, 1)?.squeeze(2)?.contiguous();
        let (q, k, v) = (at(&t[0], h)?, at(&t[1], h * groups / heads)?, at(&t[2], h * groups / heads)?);
        let scores = (q.matmul(&k.t()?.contiguous()?)? * SCALE)?.broadcast_add(&mask)?;
        candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&v)
    };
    Tensor::stack(&(0..heads).map(head).collect::<Result<Vec<_>>>()?, 2)
}

#[test]
fn flash_attn_equals_its_composed_form() {
    // Batch, queries, keys, heads, key heads, dim, width.
    for [b, q, k, h, g, d, w] in [
        [1, 1, 1, 1, 1, 1, 1],
        [2, 7, 7, 3, 3, 4, 5],
        [1, 65, 70, 2, 1, 8, 8],
        [3, 5, 9, 6, 2, 3, 4],
        [2, 130, 131, 4, 4, 16, 16],
    ] {
        let inputs = [randn(&[b, q, h, d]), randn(&[b, k, g, d]), randn(&[b, k, g, w])];
        compare(&fused_flash, &|t| composed(t, false), &inputs);
        compare(&fused_causal_flash, &|t| composed(t, true), &inputs);
    }
    let small = [randn(&[1, 3, 2, 2]), randn(&[1, 4, 1, 2]), randn(&[1, 4, 1, 3])];
    differences(&fused_flash, &small);
    differences(&fused_causal_flash, &small);
}

#[test]
fn queries_without_a_visible_key_give_zeros() -> Result<()> {
    let inputs = [randn(&[1, 5, 2, 3]), randn(&[1, 2, 2, 3]), randn(&[1, 2, 2, 3])];
    let results = run(&fused_causal_flash, &inputs, View::Plain)?;
    for of_queries in &results[..2] {
        let zeros = of_queries.narrow(1, 0, 3)?;
        assert_eq!(distance(&zeros, &zeros.zeros_like()?), 0.0);
    }
    let seen = fused_causal_flash(&[inputs[0].narrow(1, 3, 2)?, inputs[1].clone(), inputs[2].clone()])?;
    // The host computes `seen`. A GPU may add in another order.
    let most = if device().is_cpu() { 0.0 } else { 1e-12 };
    assert!(distance(&results[0].narrow(1, 3, 2)?, &seen) <= most);
    Ok(())
}
