//! The arithmetic of the reference models, composed of differentiable candle ops, or fused.
//!
//! candle-nn's own fused `layer_norm`, `rms_norm` and `softmax_last_dim` drop gradients silently, so they are not used.

use candle_core::shape::ShapeWithOneHole;
use candle_core::{D, Result, Tensor};
use candle_shard::kernels;
use candle_shard::random::{Distribution, Stream, sample_full};

/// The arithmetic of the reference models.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Arithmetic {
    /// Plain candle ops, slow but reliable: the reference of the tests.
    #[default]
    Composed,
    /// The fused kernels of [`candle_shard::kernels`], for fair speed comparisons with one device.
    Fused,
}

impl Arithmetic {
    pub(crate) fn linear(self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        match self {
            Self::Composed => linear(x, weight, bias),
            Self::Fused => kernels::linear(x, weight, bias),
        }
    }

    pub(crate) fn layer_norm(self, x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
        match self {
            Self::Composed => layer_norm(x, weight, bias, eps),
            Self::Fused => kernels::layer_norm(x, weight, bias, eps),
        }
    }

    pub(crate) fn attention_softmax(self, scores: &Tensor, scale: f64, causal: bool) -> Result<Tensor> {
        match self {
            Self::Composed => attention_softmax(&(scores * scale)?, causal),
            Self::Fused if causal => kernels::causal_softmax(scores, scale),
            Self::Fused => kernels::softmax(&(scores * scale)?),
        }
    }

    pub(crate) fn cross_entropy(self, logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
        match self {
            Self::Composed => cross_entropy(logits, targets),
            Self::Fused => {
                let logits = kernels::reshape(logits, ((), logits.dim(D::Minus1)?))?;
                kernels::cross_entropy(&logits, &targets.flatten_all()?)?.mean_all()
            }
        }
    }

    pub(crate) fn add(self, a: &Tensor, b: &Tensor) -> Result<Tensor> {
        match self {
            Self::Composed => a.broadcast_add(b),
            Self::Fused => kernels::add(a, b),
        }
    }

    pub(crate) fn reshape(self, x: &Tensor, shape: impl ShapeWithOneHole) -> Result<Tensor> {
        match self {
            Self::Composed => x.reshape(shape),
            Self::Fused => kernels::reshape(x, shape),
        }
    }

    pub(crate) fn gelu_erf(self, x: &Tensor) -> Result<Tensor> {
        match self {
            Self::Composed => gelu_erf(x),
            Self::Fused => kernels::gelu_erf(x),
        }
    }
}

/// Returns `x · weightᵀ + bias` for `x` of shape `[.., in]` and `weight` of shape `[out, in]`.
fn linear(x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
    let (out_dim, in_dim) = weight.dims2()?;
    let mut out_shape = x.dims().to_vec();
    *out_shape.last_mut().unwrap_or(&mut 0) = out_dim;
    // A single 2-dim product, because candle's broadcast matmul is much slower.
    let y = x.reshape(((), in_dim))?.matmul(&weight.t()?)?.reshape(out_shape)?;
    match bias {
        Some(bias) => y.broadcast_add(bias),
        None => Ok(y),
    }
}

/// Returns the rows of `weight` at `ids`, of shape `[..ids, dim]`.
pub(crate) fn embedding(weight: &Tensor, ids: &Tensor) -> Result<Tensor> {
    let shape = [ids.dims(), &weight.dims()[1..]].concat();
    weight.index_select(&ids.flatten_all()?, 0)?.reshape(shape)
}

/// Layer norm over the last dim (Ba et al., 2016).
fn layer_norm(x: &Tensor, weight: &Tensor, bias: &Tensor, eps: f64) -> Result<Tensor> {
    let centered = x.broadcast_sub(&x.mean_keepdim(D::Minus1)?)?;
    let stdev = (centered.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    centered.broadcast_div(&stdev)?.broadcast_mul(weight)?.broadcast_add(bias)
}

/// RMS norm over the last dim (Zhang and Sennrich, 2019).
pub(crate) fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    let rms = (x.sqr()?.mean_keepdim(D::Minus1)? + eps)?.sqrt()?;
    x.broadcast_div(&rms)?.broadcast_mul(weight)
}

/// Softmax over the last dim of `scores` of shape `[.., queries, keys]`. `causal` hides the keys after a query.
fn attention_softmax(scores: &Tensor, causal: bool) -> Result<Tensor> {
    let scores = if causal {
        let (queries, keys) = (scores.dim(D::Minus2)?, scores.dim(D::Minus1)?);
        let mask: Vec<f32> = (0..queries)
            .flat_map(|query| (0..keys).map(move |key| if key > query { f32::NEG_INFINITY } else { 0.0 }))
            .collect();
        let mask = Tensor::from_vec(mask, (queries, keys), scores.device())?;
        scores.broadcast_add(&mask.to_dtype(scores.dtype())?)?
    } else {
        scores.clone()
    };
    // The result does not depend on the shift, so the shift needs no gradient.
    let shift = scores.detach().max_keepdim(D::Minus1)?;
    let exp = scores.broadcast_sub(&shift)?.exp()?;
    exp.broadcast_div(&exp.sum_keepdim(D::Minus1)?)
}

/// GELU in its exact form, `x · Φ(x)` with the error function.
///
/// Composed, because the backward pass of candle's `gelu_erf` uses a constant with six digits (error 1e-6) and computes
/// the error function a second time.
fn gelu_erf(x: &Tensor) -> Result<Tensor> {
    let phi = (x * std::f64::consts::FRAC_1_SQRT_2)?.erf()?.affine(0.5, 0.5)?;
    x * phi
}

/// Returns the mean over all rows of `-log softmax(logits)[target]`, for logits `[.., classes]` and u32 targets `[..]`.
pub(crate) fn cross_entropy(logits: &Tensor, targets: &Tensor) -> Result<Tensor> {
    let logits = logits.reshape(((), logits.dim(D::Minus1)?))?;
    let targets = targets.flatten_all()?.unsqueeze(1)?;
    let shift = logits.detach().max_keepdim(1)?;
    let log_sum = (logits.broadcast_sub(&shift)?.exp()?.sum_keepdim(1)?.log()? + shift)?;
    (log_sum - logits.gather(&targets, 1)?)?.mean_all()
}

/// Keeps each element with probability `1 - p` and scales it by `1 / (1 - p)`. The choice depends on `stream` and
/// index.
pub(crate) fn dropout(x: &Tensor, p: f64, stream: Stream) -> Result<Tensor> {
    if p == 0.0 {
        return Ok(x.clone());
    }
    let keep = sample_full(stream, Distribution::Bernoulli { p: 1.0 - p }, x.dims(), x.dtype(), x.device())?;
    (x * keep)? / (1.0 - p)
}
