//! Sums, means and variances. Reducing a sharded dim gives partial sums. 16-bit floats are summed in f32.
use crate::layout::{Placement, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::strict::inherent;
use crate::{DTensor, Result};
use candle_core::shape::{Dim, Dims};
use candle_core::{DType, Shape, Tensor};

const SUM: Placement = Placement::PARTIAL_SUM;

impl DTensor {
    /// The sum over `dims`, which stay with size 1.
    #[track_caller]
    pub fn sum_keepdim(&self, dims: impl Dims) -> Result<Self> {
        let dims = dims.to_indexes(&Shape::from(self.dims()), "sum_keepdim")?;
        let signature = || {
            let mut shape = self.dims().to_vec();
            dims.iter().for_each(|&d| shape[d] = 1);
            Ok(Signature::new(rows(self.rank(), &dims, |d| d), &shape, self.dtype()))
        };
        rules::run("sum_keepdim", &dims, &[self], signature, |x, _| {
            summed(&x[0], |x| x.sum_keepdim(&dims[..]))
        })
    }

    /// The sum over `dims`, which go away.
    #[track_caller]
    pub fn sum(&self, dims: impl Dims) -> Result<Self> {
        let dims = dims.to_indexes(&Shape::from(self.dims()), "sum")?;
        let signature = || {
            let rows = rows(self.rank(), &dims, |d| (0..d).filter(|k| !dims.contains(k)).count());
            Ok(Signature::new(rows, &without(self.dims(), &dims), self.dtype()))
        };
        rules::run("sum", &dims, &[self], signature, |x, _| summed(&x[0], |x| x.sum(&dims[..])))
    }

    /// The sum of all elements, a scalar.
    #[track_caller]
    pub fn sum_all(&self) -> Result<Self> {
        let signature = || {
            let dims: Vec<usize> = (0..self.rank()).collect();
            Ok(Signature::new(rows(self.rank(), &dims, |d| d), &[], self.dtype()))
        };
        rules::run("sum_all", &[], &[self], signature, |x, _| summed(&x[0], Tensor::sum_all))
    }

    /// The mean over `dims`, which stay with size 1; the count is the global one.
    #[track_caller]
    pub fn mean_keepdim(&self, dims: impl Dims) -> Result<Self> {
        self.check_float("mean_keepdim")?;
        let dims = dims.to_indexes(&Shape::from(self.dims()), "mean_keepdim")?;
        let count: usize = dims.iter().map(|&d| self.dims()[d]).product();
        self.in_full_precision(|x| x.sum_keepdim(&dims[..])?.affine(1.0 / count as f64, 0.0))
    }

    /// The mean over `dims`, which go away; the count is the global one.
    #[track_caller]
    pub fn mean(&self, dims: impl Dims) -> Result<Self> {
        let dims = dims.to_indexes(&Shape::from(self.dims()), "mean")?;
        self.mean_keepdim(&dims[..])?.reshape(without(self.dims(), &dims))
    }

    /// The mean of all elements, a scalar; the count is the global one.
    #[track_caller]
    pub fn mean_all(&self) -> Result<Self> {
        self.check_float("mean_all")?;
        self.in_full_precision(|x| x.sum_all()?.affine(1.0 / x.elem_count() as f64, 0.0))
    }

    /// The unbiased variance over a dim, which stays with size 1; mean and count are the global ones.
    ///
    /// A sharded dim costs one all_reduce of the sums. The result is partial sums.
    #[track_caller]
    pub fn var_keepdim(&self, dim: impl Dim) -> Result<Self> {
        self.check_float("var_keepdim")?;
        let dim = dim.to_index(&Shape::from(self.dims()), "var_keepdim")?;
        let freedom = (self.dims()[dim] as f64 - 1.0).max(0.0);
        self.settled(&[dim])?.in_full_precision(|x| {
            // The sum of squares is minimal at the mean, so the mean adds nothing to the gradient.
            let squares = inherent(|| x.sub(x.detach().mean_keepdim(dim)?))?.sqr()?;
            squares.sum_keepdim(dim)?.affine(1.0 / freedom, 0.0)
        })
    }

    /// The unbiased variance over a dim, which goes away; mean and count are the global ones.
    #[track_caller]
    pub fn var(&self, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "var")?;
        self.var_keepdim(dim)?.reshape(without(self.dims(), &[dim]))
    }

    /// The root of the unbiased variance over a dim, which stays with size 1.
    ///
    /// A sharded dim costs two all_reduces, of the sums and of the squares.
    #[track_caller]
    pub fn std_keepdim(&self, dim: impl Dim) -> Result<Self> {
        self.check_float("std_keepdim")?;
        let dim = dim.to_index(&Shape::from(self.dims()), "std_keepdim")?;
        self.in_full_precision(|x| {
            let var = x.var_keepdim(dim)?;
            inherent(|| var.sqrt())
        })
    }

    /// The root of the unbiased variance over a dim, which goes away.
    #[track_caller]
    pub fn std(&self, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "std")?;
        self.std_keepdim(dim)?.reshape(without(self.dims(), &[dim]))
    }

    /// The root of the sum of all squares, a scalar.
    #[track_caller]
    pub fn norm(&self) -> Result<Self> {
        self.in_full_precision(|x| {
            let squares = x.sqr()?.sum_all()?;
            inherent(|| squares.sqrt())
        })
    }

    /// Applies `f` in f32 to 16-bit floats: long sums in 16 bits stop growing.
    #[track_caller]
    pub(super) fn in_full_precision(&self, f: impl FnOnce(&Self) -> Result<Self>) -> Result<Self> {
        match self.dtype() {
            DType::F16 | DType::BF16 => {
                let made = f(&self.to_dtype(DType::F32)?)?;
                inherent(|| made.to_dtype(self.dtype()))
            }
            _ => f(self),
        }
    }
}

/// Applies `f`, which sums, to a local tensor.
fn summed(x: &DTensor, f: impl Fn(&Tensor) -> candle_core::Result<Tensor>) -> Result<Tensor> {
    let x = x.to_local();
    Ok(match x.dtype() {
        DType::F16 | DType::BF16 => f(&x.to_dtype(DType::F32)?)?.to_dtype(x.dtype())?,
        _ => f(x)?,
    })
}

/// A shape without some of its dims.
pub(super) fn without(shape: &[usize], dims: &[usize]) -> Vec<usize> {
    shape.iter().enumerate().filter(|(d, _)| !dims.contains(d)).map(|(_, &size)| size).collect()
}

/// Shards of kept dims stay at their new place, shards of summed dims become partial sums.
fn rows(rank: usize, summed: &[usize], place: impl Fn(usize) -> usize) -> ShardingRules {
    let row = |d: usize| {
        if summed.contains(&d) {
            ShardingRule::new(SUM, &[Shard(d)])
        } else {
            ShardingRule::new(Shard(place(d)), &[Shard(d)])
        }
    };
    (0..rank).map(row).chain([ShardingRule::new(SUM, &[SUM])]).collect()
}
