//! Products over dims. A sharded dim is reduced to one number for each shard, which the ranks exchange.
use super::reduce::without;
use crate::layout::{Replicate, Shard, Spec};
use crate::rules::{self, OpSpec, Signature};
use crate::{DTensor, Result};
use candle_core::shape::Dim;
use candle_core::{Shape, Tensor};
use candle_dist::backend::Dims;
use candle_dist::empty;
use smallvec::smallvec;

impl DTensor {
    /// The product over a dim, which stays with size 1. Over a dim without elements it is 1.
    ///
    /// Zeros are no exception: the gradient of an element is the product of the others. 16-bit floats are multiplied in
    /// f32. A sharded dim costs one all_gather of one number per rank and row, and nothing in the backward pass.
    #[track_caller]
    pub fn prod_keepdim(&self, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "prod_keepdim")?;
        self.product_over(&[dim])
    }

    /// The product over a dim, which goes away; see [`prod_keepdim`](Self::prod_keepdim).
    #[track_caller]
    pub fn prod(&self, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "prod")?;
        self.product_over(&[dim])?.reshape(without(self.dims(), &[dim]))
    }

    /// The product of all elements, a scalar; see [`prod_keepdim`](Self::prod_keepdim).
    #[track_caller]
    pub fn prod_all(&self) -> Result<Self> {
        let dims: Vec<usize> = (0..self.rank()).collect();
        self.product_over(&dims)?.reshape(())
    }

    #[track_caller]
    fn product_over(&self, dims: &[usize]) -> Result<Self> {
        let settled = self.settled(dims)?;
        settled.in_full_precision(|x| dims.iter().try_fold(x.clone(), |x, &dim| x.product_of_dim(dim)))
    }

    #[track_caller]
    fn product_of_dim(&self, dim: usize) -> Result<Self> {
        if self.sharded_axes(dim).next().is_some() {
            let whole = |_, placement| if placement == Shard(dim) { Replicate } else { placement };
            return self.products_of_pieces(dim)?.placed(whole)?.product_of_dim(dim);
        }
        let signature = || {
            let mut shape = self.dims().to_vec();
            shape[dim] = 1;
            Ok(Signature::new(self.kept_rows(&[dim]), &shape, self.dtype()))
        };
        rules::run("prod", &[dim], &[self], signature, |x, out| Ok(product(x[0].to_local(), dim, out)?))
    }

    /// The product of each shard of a dim, as a dim with one element for each.
    #[track_caller]
    fn products_of_pieces(&self, dim: usize) -> Result<Self> {
        let op_spec = || {
            let mut out = self.targets();
            let mut shape = Dims::from_slice(self.dims());
            shape[dim] = 1;
            for axis in self.sharded_axes(dim) {
                out[axis] = Shard(dim).into();
                shape[dim] *= self.mesh().shape()[axis];
            }
            OpSpec::laid(&[self], [self.targets()], &out, &[(shape, self.dtype())])
        };
        let mut made = rules::run_with("prod of pieces", &[dim], &[self], &op_spec, &|x, outs| {
            Ok(smallvec![product(x[0].to_local(), dim, &outs[0])?])
        })?;
        Ok(made.remove(0))
    }
}

/// The product over a dim: each half times the other, so that a few multiplications do.
fn product(x: &Tensor, dim: usize, out: &Spec) -> candle_core::Result<Tensor> {
    if x.elem_count() == 0 {
        return empty::zeros_of(&[x], out.local_shape().as_slice(), x.dtype())? + 1.0;
    }
    let mut x = x.copy()?; // not the memory of `x`, also for one element
    while x.dim(dim)? > 1 {
        let (len, half) = (x.dim(dim)?, x.dim(dim)? / 2);
        let halves = (x.narrow(dim, 0, half)? * x.narrow(dim, half, half)?)?;
        x = match len % 2 {
            0 => halves,
            _ => Tensor::cat(&[&halves, &x.narrow(dim, len - 1, 1)?], dim)?,
        };
    }
    Ok(x)
}
