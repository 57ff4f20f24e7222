//! Concatenation, and ops that repeat or move elements along a dim that each rank holds whole.
//!
//! Other dims keep their shards. If the dim itself is sharded, the shard moves to another dim (all_to_all), or is
//! gathered if no dim can be sharded.
use crate::layout::{Placement, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::shape::Dim;
use candle_core::{Shape, Tensor};
use candle_dist::backend::Dims;
use smallvec::SmallVec;
use std::borrow::Borrow;

const SUM: Placement = Placement::PARTIAL_SUM;

/// Rows for each unchanged dim, sharded in all of `inputs` inputs, and for partial sums.
fn rows(rank: usize, inputs: usize, whole: impl Fn(usize) -> bool) -> ShardingRules {
    let alike = |p: Placement| ShardingRule { out: p, ins: SmallVec::from_elem(p, inputs) };
    (0..rank).filter(|&d| !whole(d)).map(|d| alike(Shard(d))).chain([alike(SUM)]).collect()
}

impl DTensor {
    /// Concatenates tensors along a dim. Their other dims must be equal.
    #[track_caller]
    pub fn cat(tensors: &[impl Borrow<Self>], dim: impl Dim) -> Result<Self> {
        let tensors: Vec<&Self> = tensors.iter().map(Borrow::borrow).collect();
        let Some(first) = tensors.first() else { return Error::op("cat", "no tensors; give at least one") };
        let dim = dim.to_index(&Shape::from(first.dims()), "cat")?;
        let signature = || {
            let alike = |x: &&Self| {
                let dims = x.rank() == first.rank()
                    && (0..x.rank()).all(|d| d == dim || x.dims()[d] == first.dims()[d]);
                dims && x.dtype() == first.dtype()
            };
            if let Some(other) = tensors.iter().find(|&x| !alike(x)) {
                let reason = format!("{} and {} differ in more than dim {dim}", first.spec(), other.spec());
                return Error::op("cat", reason);
            }
            let mut shape = Dims::from_slice(first.dims());
            shape[dim] = tensors.iter().map(|x| x.dims()[dim]).sum();
            Ok(Signature::new(rows(first.rank(), tensors.len(), |d| d == dim), &shape, first.dtype()))
        };
        rules::run("cat", &[dim], &tensors, signature, |x, _| {
            let locals: Vec<&Tensor> = x.iter().map(Self::to_local).collect();
            Ok(Tensor::cat(&locals, dim)?)
        })
    }

    /// Stacks tensors of one shape along a new dim.
    #[track_caller]
    pub fn stack(tensors: &[impl Borrow<Self>], dim: impl Dim) -> Result<Self> {
        let Some(first) = tensors.first() else { return Error::op("stack", "no tensors; give at least one") };
        let first = first.borrow();
        let dim = dim.to_index_plus_one(&Shape::from(first.dims()), "stack")?;
        if let Some(other) = tensors.iter().map(Borrow::borrow).find(|x| x.dims() != first.dims()) {
            return Error::op(
                "stack",
                format!("{} and {} have different shapes", first.spec(), other.spec()),
            );
        }
        Self::cat(&tensors.iter().map(|x| x.borrow().unsqueeze(dim)).collect::<Result<Vec<_>>>()?, dim)
    }

    /// Pads a dim with `left` copies of its first element and `right` copies of its last element.
    #[track_caller]
    pub fn pad_with_same(&self, dim: impl Dim, left: usize, right: usize) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "pad_with_same")?;
        let signature = || {
            if self.dims()[dim] == 0 && left + right > 0 {
                return Error::op(
                    "pad_with_same",
                    format!("dim {dim} of {} has no element to repeat", self.spec()),
                );
            }
            let mut shape = Dims::from_slice(self.dims());
            shape[dim] += left + right;
            Ok(Signature::new(rows(self.rank(), 1, |d| d == dim), &shape, self.dtype()))
        };
        rules::run("pad_with_same", &[dim, left, right], &[self], signature, |x, _| {
            Ok(x[0].to_local().pad_with_same(dim, left, right)?)
        })
    }

    /// Repeats the tensor `times[d]` times along each dim. If there are more numbers than dims, dims are added on the
    /// left.
    #[track_caller]
    pub fn repeat(&self, times: impl Into<Shape>) -> Result<Self> {
        let times = times.into();
        let times = times.dims();
        if times.len() > self.rank() {
            let ones = vec![1; times.len() - self.rank()];
            return self.reshape([&ones, self.dims()].concat())?.repeat(times);
        }
        let times_of = |d: usize| times.get(d).copied().unwrap_or(1);
        let signature = || {
            let shape: Dims = self.dims().iter().enumerate().map(|(d, size)| size * times_of(d)).collect();
            Ok(Signature::new(rows(self.rank(), 1, |d| times_of(d) != 1), &shape, self.dtype()))
        };
        let repeated =
            rules::run("repeat", times, &[self], signature, |x, _| Ok(x[0].to_local().repeat(times)?))?;
        Ok(repeated.aliasing(self))
    }

    /// Rotates the elements of a dim by `shift` places; elements from its end come to its start.
    #[track_caller]
    pub fn roll(&self, shift: i32, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "roll")?;
        let size = self.dims()[dim];
        let shift = (i64::from(shift)).rem_euclid(size.max(1) as i64) as usize;
        if shift == 0 {
            return Ok(self.clone());
        }
        let signature = || Ok(Signature::new(rows(self.rank(), 1, |d| d == dim), self.dims(), self.dtype()));
        rules::run("roll", &[dim, shift], &[self], signature, |x, _| {
            let (first, last) = (x[0].to_local().narrow(dim, 0, size - shift)?, size - shift);
            Ok(Tensor::cat(&[&x[0].to_local().narrow(dim, last, shift)?, &first], dim)?)
        })
    }

    /// Reverses the elements of each of these dims.
    #[track_caller]
    pub fn flip(&self, dims: &[usize]) -> Result<Self> {
        let signature = || {
            if let Some(dim) = dims.iter().find(|&&dim| dim >= self.rank()) {
                return Error::op(
                    "flip",
                    format!("{} has no dim {dim}; name dims below {}", self.spec(), self.rank()),
                );
            }
            Ok(Signature::new(rows(self.rank(), 1, |d| dims.contains(&d)), self.dims(), self.dtype()))
        };
        let flipped = rules::run("flip", dims, &[self], signature, |x, _| {
            Ok(x[0].to_local().contiguous()?.flip(dims)?)
        })?;
        Ok(flipped.aliasing(self))
    }
}
