//! Comparison of two sharded tensors.
use super::ShardedTensor;
use crate::Result;
use crate::kernels::convert;
use candle_core::{DType, Device, Tensor};
use candle_dist::ReduceOp;

impl ShardedTensor {
    /// Returns whether both have the same shape, dtype, shards, ranks and elements; the result is equal on every rank.
    ///
    /// NaN equals nothing. Runs one small collective.
    pub fn equal(&self, other: &Self) -> Result<bool> {
        self.compared(other, |a, b| Ok(a.eq(b)?.to_vec1::<u8>()?.into_iter().all(|same| same == 1)))
    }

    /// Returns whether both have the same shape, dtype, shards and ranks, and elements with
    /// `|a - b| <= atol + rtol·|b|`.
    ///
    /// The result is equal on every rank. An infinity is close only to itself, and NaN to nothing. Elements are
    /// compared as f64. Runs one small collective.
    pub fn allclose(&self, other: &Self, rtol: f64, atol: f64) -> Result<bool> {
        let close =
            |(a, b): (f64, f64)| a == b || ((a - b).is_finite() && (a - b).abs() <= atol + rtol * b.abs());
        let list = |tensor: &Tensor| convert(tensor, DType::F64)?.to_vec1::<f64>();
        self.compared(other, |a, b| Ok(list(a)?.into_iter().zip(list(b)?).all(close)))
    }

    /// Returns whether both have the same layout and `same` holds for all pairs of non-empty shards, flattened.
    fn compared(
        &self,
        other: &Self,
        same: impl Fn(&Tensor, &Tensor) -> candle_core::Result<bool>,
    ) -> Result<bool> {
        if !self.lies_like(other) {
            return Ok(false);
        }
        let mut alike = true;
        for (a, b) in self.shards.iter().zip(&other.shards).filter(|(a, _)| !a.metadata.is_empty()) {
            alike = alike && same(&a.tensor.detach().flatten_all()?, &b.tensor.detach().flatten_all()?)?;
        }
        let alike = Tensor::new(&[u8::from(alike)], &Device::Cpu)?;
        Ok(self.group().all_reduce(&alike, ReduceOp::Min)?.to_vec1::<u8>()? == [1])
    }
}
