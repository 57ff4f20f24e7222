//! Softmax and related ops over any dim. For a sharded dim only the maxima and the sums are exchanged.
use super::extreme::Extreme::Max;
use super::reduce::without;
use crate::strict::inherent;
use crate::{DTensor, Result};
use candle_core::Shape;
use candle_core::shape::{Dim, Dims};

impl DTensor {
    /// The softmax over a dim.
    ///
    /// A sharded dim costs two all_reduces of one number per row, and one in the backward pass.
    #[track_caller]
    pub fn softmax(&self, dim: impl Dim) -> Result<Self> {
        self.check_float("softmax")?;
        let dim = dim.to_index(&Shape::from(self.dims()), "softmax")?;
        if dim + 1 == self.rank() && self.sharded_axes(dim).next().is_none() {
            return self.softmax_of_rows();
        }
        if self.elem_count() == 0 {
            return Ok(self.clone());
        }
        self.settled(&[dim])?.in_full_precision(|x| {
            let powers = x.below_maximum(&[dim])?.0.exp()?;
            inherent(|| powers.div(powers.sum_keepdim(dim)?))
        })
    }

    /// The softmax over the last dim; see [`softmax`](Self::softmax).
    #[track_caller]
    pub fn softmax_last_dim(&self) -> Result<Self> {
        self.check_rows("softmax_last_dim", 1)?;
        self.softmax(self.rank() - 1)
    }

    /// The logarithm of the softmax over a dim.
    ///
    /// A sharded dim costs two all_reduces of one number per row, and one in the backward pass.
    #[track_caller]
    pub fn log_softmax(&self, dim: impl Dim) -> Result<Self> {
        self.check_float("log_softmax")?;
        let dim = dim.to_index(&Shape::from(self.dims()), "log_softmax")?;
        if self.elem_count() == 0 {
            return Ok(self.clone());
        }
        self.settled(&[dim])?.in_full_precision(|x| {
            let x = x.below_maximum(&[dim])?.0;
            x.sub(x.exp()?.sum_keepdim(dim)?.resolve_partial()?.log()?)
        })
    }

    /// The logarithm of the sum of the exponentials over `dims`, which go away.
    ///
    /// A sharded dim costs two all_reduces of one number per row, and none in the backward pass. Over a dim without
    /// elements it is -∞, as in PyTorch.
    #[track_caller]
    pub fn log_sum_exp(&self, dims: impl Dims) -> Result<Self> {
        self.check_float("log_sum_exp")?;
        let dims = dims.to_indexes(&Shape::from(self.dims()), "log_sum_exp")?;
        self.settled(&dims)?.in_full_precision(|x| {
            if dims.iter().any(|&dim| self.dims()[dim] == 0) {
                // There is no maximum to subtract.
                return x.sum(&dims[..])?.resolve_partial()?.log();
            }
            let (x, top) = x.below_maximum(&dims)?;
            let sum = x.exp()?.sum_keepdim(&dims[..])?.resolve_partial()?;
            sum.log()?.add(top)?.reshape(without(self.dims(), &dims))
        })
    }

    /// Returns this tensor minus its maximum over `dims`, and the maximum, which is treated as a constant: it cancels
    /// out.
    #[track_caller]
    fn below_maximum(&self, dims: &[usize]) -> Result<(Self, Self)> {
        let top = self.detach().extreme(Max, dims)?.resolve_partial()?;
        Ok((self.sub(&top)?, top))
    }
}
