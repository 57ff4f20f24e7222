//! Dropout in one launch, and in one for its gradient: no mask is kept.
use super::call::{FusedCall, KernelText, Scalar};
use super::run::{computes, made, node};
use crate::random::{Distribution, DrawLaunch, Stream};
use candle_core::{DType, Result, Tensor};
use candle_dist_base::{Fresh, edges};
use half::{bf16, f16};
use std::ops::Range;

/// The dims of a part of a tensor that a kernel gets.
const MOST_DIMS: usize = 4;

/// What a part of a tensor loses.
struct DropoutMask {
    launch: DrawLaunch,
    /// The probability of what is kept, and its factor.
    keep: [f64; 2],
}

/// Returns `x`, the block `block` of a tensor of shape `global_shape`, times the numbers that a [`sample`](crate::random::sample) of
/// [`Bernoulli`](Distribution::Bernoulli) with `keep` has there, times `factor`, with the bits of these products; `None` where no kernel
/// computes it.
///
/// # Errors
/// Those of `sample`.
pub fn dropout(
    x: &Tensor,
    stream: Stream,
    [keep, factor]: [f64; 2],
    global_shape: &[usize],
    block: &[Range<usize>],
) -> Result<Option<Tensor>> {
    if !computes(&[x]) {
        return Ok(None);
    }
    let distribution = Distribution::Bernoulli { p: keep };
    let launch = DrawLaunch::new(stream, distribution, global_shape, block, x.dtype())?;
    if launch.dims.len() > 2 * MOST_DIMS {
        return Ok(None);
    }
    // The product of the mask and the factor is rounded before that with the numbers.
    let factor = match x.dtype() {
        DType::BF16 => bf16::from_f64(factor).to_f64(),
        DType::F16 => f16::from_f64(factor).to_f64(),
        _ => factor,
    };
    let mask = DropoutMask { launch, keep: [keep, factor] };
    let x = x.contiguous()?;
    let (y, input) = (mask.applied(&x)?, x.clone());
    let backward = move |grad: &Tensor| {
        let dx = mask.applied(grad)?.into_tensor();
        Ok([edges::keep(&input, dx)?, None, None])
    };
    node("dropout", &[&x], y, backward).map(Some)
}

impl DropoutMask {
    /// The product of the mask and a contiguous tensor.
    fn applied(&self, x: &Tensor) -> Result<Fresh> {
        let DrawLaunch { count, base, dims, stream: [seed, id, first], blocks, .. } = &self.launch;
        let mut given = [0; 2 * MOST_DIMS];
        given[..dims.len()].copy_from_slice(dims);
        let counts = [&[*count, *base, dims.len() as u64 / 2][..], &given, &[*seed, *id, *first]].concat();
        let counts = counts.into_iter().map(|count| Scalar::Count(count as usize));
        let numbers: Vec<Scalar> = counts.chain(self.keep.map(Scalar::Real)).collect();
        let [y] = made(&FusedCall {
            text: KernelText::Dropout,
            op: "dropout",
            dtype: x.dtype(),
            grid: [*blocks as usize, 1],
            block: [DrawLaunch::THREADS as usize, 1],
            inputs: &[Some(x)],
            outputs: &[Some((x.shape().clone(), x.dtype()))],
            numbers: &numbers,
        })?;
        Ok(y)
    }
}
