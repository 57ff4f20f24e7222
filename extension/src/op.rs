//! An op with its own gradient: the soft threshold of sparse coding.
use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor, bail};
use candle_shard::rules::{self, ShardingRule, ShardingRules, Signature};
use candle_shard::{DTensor, Error, Result, Shard};

/// `sign(x) · max(|x| - by, 0)` on plain tensors, as one node of candle's graph.
struct SoftThreshold {
    by: f64,
}

impl CustomOp1 for SoftThreshold {
    fn name(&self) -> &'static str {
        "soft_threshold"
    }

    fn cpu_fwd(&self, storage: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let Some((start, end)) = layout.contiguous_offsets() else {
            bail!("soft_threshold: expected contiguous memory")
        };
        let less = |x: f64| x.signum() * (x.abs() - self.by).max(0.0);
        let made = match storage {
            CpuStorage::F32(xs) => {
                CpuStorage::F32(xs[start..end].iter().map(|&x| less(x.into()) as f32).collect())
            }
            CpuStorage::F64(xs) => CpuStorage::F64(xs[start..end].iter().map(|&x| less(x)).collect()),
            _ => bail!("soft_threshold: expected f32 or f64"),
        };
        Ok((made, layout.shape().clone()))
    }

    /// The gradient passes where the result is not 0. candle panics if `bwd` returns `None`.
    fn bwd(&self, x: &Tensor, _: &Tensor, grad: &Tensor) -> candle_core::Result<Option<Tensor>> {
        Ok(Some(x.abs()?.gt(self.by)?.where_cond(grad, &grad.zeros_like()?)?))
    }
}

/// Returns the soft threshold of a plain tensor.
///
/// # Errors
/// For dtypes other than f32 and f64.
pub fn plain_soft_threshold(x: &Tensor, by: f64) -> candle_core::Result<Tensor> {
    x.contiguous()?.apply_op1(SoftThreshold { by })
}

/// Moves each element toward 0 by `by`, and sets it to 0 if it is closer: `sign(x) · max(|x| - by, 0)`.
///
/// Any dim may be sharded. Partial sums are reduced first, because the op is not linear.
///
/// # Errors
/// For dtypes other than f32 and f64.
#[track_caller]
pub fn soft_threshold(x: &DTensor, by: f64) -> Result<DTensor> {
    let signature = || {
        if !matches!(x.dtype(), DType::F32 | DType::F64) {
            return Err(Error::Op {
                op: "soft_threshold",
                reason: format!("{}: expected f32 or f64", x.spec()),
            });
        }
        let rows: ShardingRules =
            (0..x.rank()).map(|dim| ShardingRule::new(Shard(dim), &[Shard(dim)])).collect();
        Ok(Signature::new(rows, x.dims(), x.dtype()))
    };
    // Shape, dtype and layout do not depend on `by`, so it is not an attribute.
    rules::apply("soft_threshold", &[], &[x], signature, |x, _| {
        Ok(plain_soft_threshold(x[0].to_local(), by)?)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use test_utils::{Kind::Float, OpCheck, on_ranks};

    /// Computes the op on one device by composition, which detects a wrong `bwd`.
    fn composed(x: &Tensor, by: f64) -> candle_core::Result<Tensor> {
        (x - by)?.relu()? - (x + by)?.neg()?.relu()?
    }

    #[test]
    fn it_is_that_of_one_device_in_every_layout() {
        OpCheck::new("soft_threshold")
            .dtypes(&[DType::F64, DType::F32])
            .tensor("x", &[&[4, 6], &[5, 3], &[1, 7]], Float)
            .plain("by", &[0.0, 0.6])
            .sweep(|a| soft_threshold(&a["x"], a.number("by")), |a| composed(&a["x"], a.number("by")));
    }

    #[test]
    fn whole_numbers_are_refused_alike() {
        let texts = on_ranks(2, "whole numbers", |ctx| -> Result<Option<String>> {
            let mesh = ctx.mesh(&[("tp", 2)])?;
            let ids = DTensor::distribute(&Tensor::zeros(3, DType::U32, ctx.device())?, &mesh, &[Shard(0)])?;
            Ok(soft_threshold(&ids, 1.0).err().map(|error| error.to_string()))
        });
        let expected = "soft_threshold: u32[3@tp]: expected f32 or f64, called at extension/src/op.rs:";
        assert!(
            texts.iter().all(|text| text.as_ref().is_some_and(|text| text.starts_with(expected))),
            "{texts:?}"
        );
    }
}
