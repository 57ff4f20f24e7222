//! Losses with means over the global batch.
use crate::placement::{Placement, Shard};
use crate::rules::{self, Row, Rows, Signature};
use crate::{DTensor, Error, Result, kernels};
use candle_core::DType;

impl DTensor {
    /// The mean cross entropy of these logits `[.., classes]` against `targets` (u32 or i64, `[..]`), a scalar.
    ///
    /// Sharded leading dims give partial sums of the global mean; a sharded class dim is gathered first.
    pub fn cross_entropy(&self, targets: &Self) -> Result<Self> {
        let signature = || self.cross_entropy_signature(targets);
        rules::run("cross_entropy", &[], &[self, targets], signature, |x, _| {
            let (n, classes) = (x[1].to_local().elem_count(), self.dims()[self.rank() - 1]);
            let count = x[1].elem_count();
            let per_row =
                kernels::cross_entropy(&x[0].to_local().reshape((n, classes))?, &x[1].to_local().flatten_all()?)?;
            Ok(per_row.sum_all()?.affine(1.0 / count as f64, 0.0)?)
        })
    }

    fn cross_entropy_signature(&self, targets: &Self) -> Result<Signature> {
        let Some((_, leading)) = self.dims().split_last() else {
            return Error::op("cross_entropy", format!("logits {}: want [.., classes]", self.spec()));
        };
        self.check_float("cross_entropy")?;
        if targets.dims() != leading || !matches!(targets.dtype(), DType::U32 | DType::I64) {
            let reason = format!("targets {} for logits {}: want {leading:?} u32 or i64", targets.spec(), self.spec());
            return Error::op("cross_entropy", reason);
        }
        let rows: Rows = (0..leading.len()).map(|d| Row::new(Placement::PARTIAL_SUM, &[Shard(d), Shard(d)])).collect();
        Ok(Signature::new(rows, &[], self.dtype()))
    }
}
