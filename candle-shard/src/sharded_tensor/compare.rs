//! Whether two sharded tensors hold the same.
use super::ShardedTensor;
use crate::Result;
use candle_core::{DType, Device, Tensor};
use candle_dist::ReduceOp;

impl ShardedTensor {
    /// Whether both have the same shape, dtype, shards, ranks and elements; the same answer on every rank.
    ///
    /// NaN equals nothing. One small collective.
    pub fn equal(&self, other: &Self) -> Result<bool> {
        self.compared(other, |a, b| Ok(a.eq(b)?.to_vec1::<u8>()?.into_iter().all(|same| same == 1)))
    }

    /// Whether both have the same shape, dtype, shards and ranks, and elements with `|a - b| <= atol + rtol·|b|`; the
    /// same answer on every rank.
    ///
    /// Infinities are close to themselves alone, NaN to nothing. Elements are compared as f64. One small collective.
    pub fn allclose(&self, other: &Self, rtol: f64, atol: f64) -> Result<bool> {
        let close = |(a, b): (f64, f64)| a == b || ((a - b).is_finite() && (a - b).abs() <= atol + rtol * b.abs());
        let list = |tensor: &Tensor| tensor.to_dtype(DType::F64)?.to_vec1::<f64>();
        self.compared(other, |a, b| Ok(list(a)?.into_iter().zip(list(b)?).all(close)))
    }

    /// Whether both lie alike and `same` holds of all pairs of shards with elements, flattened.
    fn compared(&self, other: &Self, same: impl Fn(&Tensor, &Tensor) -> candle_core::Result<bool>) -> Result<bool> {
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
