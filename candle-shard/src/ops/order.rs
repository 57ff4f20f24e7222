//! Sorting and top-k along the last dim.
//!
//! NaN counts as larger than every number, as in PyTorch. candle's order of NaN depends on their positions.
use super::extreme::nans;
use super::rowwise::rows;
use crate::layout::{Shard, Spec};
use crate::rules::{self, OpSpec, ShardingRule, Signature};
use crate::strict::inherent;
use crate::{DTensor, Error, Result};
use candle_core::{D, DType, Tensor};
use candle_dist::empty;
use itertools::Itertools;
use smallvec::{SmallVec, smallvec};

/// Values and their indices.
type Pair = (DTensor, DTensor);

impl DTensor {
    /// Sorts the elements along the last dim. Returns them with their indices (u32). The sort is stable.
    ///
    /// NaN counts as larger than every number.
    ///
    /// A sharded last dim is gathered, or its shard moves to another dim.
    #[track_caller]
    pub fn sort_last_dim(&self, ascending: bool) -> Result<Pair> {
        let signature = || {
            self.check_last_dim("sort_last_dim")?;
            let rows = rows(self.rank() - 1, 0);
            Ok(Signature::new(rows, self.dims(), self.dtype()).and(self.dims(), DType::U32))
        };
        let made = rules::run_all("sort_last_dim", &[], &[self], &signature, &|x, _| {
            let x = x[0].to_local().contiguous()?;
            let places = order(&x, ascending)?;
            Ok(smallvec![x.gather(&places, D::Minus1)?, places])
        })?;
        Ok(pair(made))
    }

    /// Returns the indices (u32) that sort the elements along the last dim; see [`sort_last_dim`](Self::sort_last_dim).
    #[track_caller]
    pub fn arg_sort_last_dim(&self, ascending: bool) -> Result<Self> {
        Ok(self.detach().sort_last_dim(ascending)?.1)
    }

    /// The `k` largest elements of the last dim in descending order, and their indices (u32). The first of equal ones
    /// wins.
    ///
    /// NaN counts as larger than every number.
    ///
    /// On a sharded last dim each rank finds its own `k`. Only these and their indices are exchanged, not the tensor.
    ///
    /// # Errors
    /// If the last dim has fewer than `k` elements.
    #[track_caller]
    pub fn topk(&self, k: usize) -> Result<Pair> {
        self.check_last_dim("topk")?;
        let last = self.rank() - 1;
        if k > self.dims()[last] {
            return Error::op(
                "topk",
                format!("{k} elements of the last dim of {}; expected fewer", self.spec()),
            );
        }
        let x = self.settled(&[last])?;
        let pieces: usize = x.sharded_axes(last).map(|axis| x.mesh().shape()[axis]).product();
        let mut shape = x.dims().to_vec();
        shape[last] = k;
        if pieces * k >= x.dims()[last] || pieces == 1 {
            let signature = || Ok(Signature::new(rows(last, 0), &shape, x.dtype()).and(&shape, DType::U32));
            return Ok(pair(rules::run_all("topk", &[k], &[&x], &signature, &|x, _| {
                largest(x[0].to_local(), k)
            })?));
        }
        let (values, places) = x.candidates(k, pieces)?;
        let signature = || {
            let rows = (0..last).map(|d| ShardingRule::new(Shard(d), &[Shard(d), Shard(d)])).collect();
            Ok(Signature::new(rows, &shape, x.dtype()).and(&shape, DType::U32))
        };
        let real = Tensor::new(real_candidates(x.spec(), k), x.device())?;
        let made = inherent(|| {
            rules::run_all("topk", &[k], &[&values, &places], &signature, &|candidates, _| {
                let real = |i: usize| candidates[i].to_local().index_select(&real, last);
                let found = largest(&real(0)?, k)?;
                let places = real(1)?.gather(&found[1], last)?;
                Ok(smallvec![found[0].clone(), places])
            })
        })?;
        Ok(pair(made))
    }

    /// The `k` largest elements of each of the `pieces` of the last dim. Shorter pieces are filled up with arbitrary
    /// values.
    #[track_caller]
    fn candidates(&self, k: usize, pieces: usize) -> Result<Pair> {
        let last = self.rank() - 1;
        let mut shape = self.dims().to_vec();
        shape[last] = k * pieces;
        let spec = |dtype| {
            let mut others = (0..self.mesh().ndim()).filter(|&axis| self.placements()[axis] != Shard(last));
            others
                .try_fold(Spec::new(self.mesh(), self.placements(), &shape[..], dtype)?, |spec, axis| {
                    spec.with_sizes(axis, self.spec().sizes(axis).cloned())
                })
                .map(Spec::shared)
        };
        let op_spec = || Ok(OpSpec::in_place(&[self], smallvec![spec(self.dtype())?, spec(DType::U32)?]));
        let made = rules::run_with("topk_of_pieces", &[k], &[self], &op_spec, &|x, out| {
            let (start, x) = (x[0].spec().local_block()[last].start, x[0].to_local());
            let have = x.dim(last)?.min(k);
            if have == 0 {
                // Keeps the graph connected, so that all ranks communicate alike in the backward pass.
                let shape = out[0].local_shape();
                let values = x.sum_keepdim(last)?.broadcast_as(shape.as_slice())?.contiguous()?;
                return Ok(smallvec![values, Tensor::zeros(shape.as_slice(), DType::U32, x.device())?]);
            }
            let found = largest(x, have)?;
            let places = found[1].affine(1.0, start as f64)?;
            let filled = |x: &Tensor| x.pad_with_zeros(last, 0, k - have);
            Ok(smallvec![filled(&found[0])?, filled(&places)?])
        })?;
        Ok(pair(made))
    }

    #[track_caller]
    fn check_last_dim(&self, op: &'static str) -> Result<()> {
        match self.rank() {
            0 => Error::op(op, format!("{} has no dims; expected at least one", self.spec())),
            _ => Ok(()),
        }
    }
}

fn pair(mut made: SmallVec<[DTensor; 1]>) -> Pair {
    let places = made.remove(1);
    (made.remove(0), places)
}

/// The indices that sort the last dim. The sort is stable.
fn order(x: &Tensor, ascending: bool) -> candle_core::Result<Tensor> {
    if !x.device().is_cpu() {
        // candle's kernel on GPUs is not stable, and has room for 12,288 columns.
        return order(&empty::to_host(&x.detach())?, ascending)?.to_device(x.device());
    }
    let Some(nan) = nans(x)? else { return x.arg_sort_last_dim(ascending) };
    // Sorts twice, since sorts are stable: first with NaN as infinity, then with NaN after infinity.
    let above = empty::full(f64::INFINITY, x.shape(), x.dtype(), x.device())?;
    let by_number = nan.where_cond(&above, &x.detach())?.arg_sort_last_dim(ascending)?;
    let by_nan = nan.gather(&by_number, D::Minus1)?.arg_sort_last_dim(ascending)?;
    by_number.gather(&by_nan, D::Minus1)
}

/// The `k` largest elements of the last dim, and their indices.
fn largest(x: &Tensor, k: usize) -> Result<SmallVec<[Tensor; 1]>> {
    let x = x.contiguous()?;
    let places = order(&x, false)?.narrow(D::Minus1, 0, k)?.contiguous()?;
    Ok(smallvec![x.gather(&places, D::Minus1)?, places])
}

/// The indices of candidates that are elements: a piece with fewer than `k` elements has been filled up.
fn real_candidates(spec: &Spec, k: usize) -> Vec<u32> {
    let last = spec.dims().len() - 1;
    let (mesh, mut at) = (spec.mesh(), spec.mesh().coordinate().to_vec());
    let axes: Vec<usize> = (0..mesh.ndim()).filter(|&axis| spec.placements()[axis] == Shard(last)).collect();
    let pieces = axes.iter().map(|&axis| 0..mesh.shape()[axis]).multi_cartesian_product();
    let of_piece = |(piece, place): (usize, Vec<usize>)| {
        axes.iter().zip(place).for_each(|(&axis, i)| at[axis] = i);
        let have = spec.block_at(&at)[last].len().min(k);
        (piece * k..piece * k + have).map(|i| i as u32).collect::<Vec<_>>()
    };
    pieces.enumerate().flat_map(of_piece).collect()
}
