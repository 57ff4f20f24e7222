//! Maxima and minima, and their indices.
//!
//! A sharded dim that is reduced leaves the extremes of the shards; one all_reduce makes the global extreme. With a
//! gradient, a second op without communication puts the global extreme into each rank's graph. Each element that equals
//! it gets the gradient, on whichever rank it lies, as in candle.
//!
//! NaN is the extreme wherever it occurs, as in PyTorch, and its index is that of the first NaN. Such an extreme has no
//! gradient. In candle the result depends on the position of the NaN.
use super::reduce::without;
use crate::kernels::{NOWHERE, RowPiece, candidate_keys, largest_keys, parts_of_row};
use crate::layout::{Partial, Placement, Replicate, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::shape::Dim;
use candle_core::{DType, Device, Shape, Tensor};
use candle_dist::{ReduceOp, empty};

#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Extreme {
    Max,
    Min,
}

use Extreme::{Max, Min};

impl Extreme {
    fn op(self) -> &'static str {
        if self == Max { "max" } else { "min" }
    }

    fn partial(self) -> Placement {
        Partial(if self == Max { ReduceOp::Max } else { ReduceOp::Min })
    }

    /// The extreme over dims of a nonempty tensor; the dims stay with size 1.
    fn over(self, x: &Tensor, dims: &[usize]) -> candle_core::Result<Tensor> {
        let one = |x: Tensor, &d: &usize| if self == Max { x.max_keepdim(d) } else { x.min_keepdim(d) };
        let extreme = dims.iter().try_fold(unrepeated(x)?, one)?;
        let Some(nan) = nans(x)? else { return Ok(extreme) };
        // candle's result depends on the position of the NaN.
        let any = dims.iter().try_fold(nan, |nan, &d| nan.max_keepdim(d))?;
        let none = empty::full(f64::NAN, extreme.shape(), x.dtype(), x.device())?;
        any.where_cond(&none, &extreme)
    }

    /// The index of the extreme over a dim, which stays with size 1: the first of equal ones, or the first NaN.
    fn place(self, x: &Tensor, dim: usize) -> candle_core::Result<Tensor> {
        let x = &unrepeated(x)?;
        let place = if self == Max { x.argmax_keepdim(dim) } else { x.argmin_keepdim(dim) }?;
        let Some(nan) = nans(x)? else { return Ok(place) };
        nan.max_keepdim(dim)?.where_cond(&nan.argmax_keepdim(dim)?, &place)
    }

    /// The neutral element: every element wins against it.
    fn neutral(self, shape: &[usize], dtype: DType, device: &Device) -> candle_core::Result<Tensor> {
        let range = match dtype {
            DType::U8 => (0, u8::MAX.into()),
            DType::U32 => (0, u32::MAX.into()),
            DType::I16 => (i16::MIN.into(), i16::MAX.into()),
            DType::I32 => (i32::MIN.into(), i32::MAX.into()),
            DType::I64 => (i64::MIN, i64::MAX),
            _ => {
                let lost = if self == Max { f64::NEG_INFINITY } else { f64::INFINITY };
                return empty::full(lost, shape, dtype, device);
            }
        };
        empty::full(if self == Max { range.0 } else { range.1 }, shape, dtype, device)
    }
}

/// Copies a tensor that has a stride of 0: candle's extremes divide by the stride of a repeated dim of size 1.
fn unrepeated(x: &Tensor) -> candle_core::Result<Tensor> {
    if x.stride().contains(&0) { x.force_contiguous() } else { Ok(x.clone()) }
}

/// 1 where an element is NaN; `None` if there is known to be none.
pub(super) fn nans(x: &Tensor) -> candle_core::Result<Option<Tensor>> {
    let x = x.detach();
    if !x.dtype().is_float() || x.device().is_cpu() && !has_nan(&x)? {
        return Ok(None);
    }
    x.ne(&x).map(Some)
}

/// Returns whether a tensor on the host has a NaN.
fn has_nan(x: &Tensor) -> candle_core::Result<bool> {
    // A sum of numbers is NaN only where infinities meet; only then are the elements searched.
    let sum = x.to_dtype(if x.dtype() == DType::F64 { DType::F64 } else { DType::F32 })?.sum_all()?;
    if !sum.to_dtype(DType::F64)?.to_scalar::<f64>()?.is_nan() {
        return Ok(false);
    }
    Ok(x.ne(x)?.flatten_all()?.max(0)?.to_scalar::<u8>()? == 1)
}

macro_rules! extremes {
    ($($which:ident, $name:ident, $keepdim:ident, $all:ident, $arg:ident, $arg_keepdim:ident, $text:literal;)*) => {
        impl DTensor {
            $(#[doc = concat!("The ", $text, " over a dim, which stays with size 1; all equal ones get the gradient.")]
            #[track_caller]
            pub fn $keepdim(&self, dim: impl Dim) -> Result<Self> {
                let dim = dim.to_index(&Shape::from(self.dims()), stringify!($keepdim))?;
                self.extreme($which, &[dim])
            }

            #[doc = concat!("The ", $text, " over a dim, which goes away; all equal ones get the gradient.")]
            #[track_caller]
            pub fn $name(&self, dim: impl Dim) -> Result<Self> {
                let dim = dim.to_index(&Shape::from(self.dims()), stringify!($name))?;
                self.extreme($which, &[dim])?.reshape(without(self.dims(), &[dim]))
            }

            #[doc = concat!("The ", $text, " of all elements, a scalar; all equal ones get the gradient.")]
            #[track_caller]
            pub fn $all(&self) -> Result<Self> {
                let dims: Vec<usize> = (0..self.rank()).collect();
                self.extreme($which, &dims)?.reshape(())
            }

            #[doc = concat!("The index (u32) of the ", $text, ", the first of equal ones; the dim stays with size 1.")]
            #[track_caller]
            pub fn $arg_keepdim(&self, dim: impl Dim) -> Result<Self> {
                let dim = dim.to_index(&Shape::from(self.dims()), stringify!($arg_keepdim))?;
                self.place_of_extreme($which, stringify!($arg), dim)
            }

            #[doc = concat!("The index (u32) of the ", $text, ", the first of equal ones; the dim goes away.")]
            #[track_caller]
            pub fn $arg(&self, dim: impl Dim) -> Result<Self> {
                let dim = dim.to_index(&Shape::from(self.dims()), stringify!($arg))?;
                self.place_of_extreme($which, stringify!($arg), dim)?.reshape(without(self.dims(), &[dim]))
            })*
        }
    };
}

extremes! {
    Max, max, max_keepdim, max_all, argmax, argmax_keepdim, "largest element";
    Min, min, min_keepdim, min_all, argmin, argmin_keepdim, "smallest element";
}

impl DTensor {
    /// The largest number of each row of a matrix, as f32, with its column: the first of equal ones, or the first NaN or +∞. Every
    /// rank gets all of them, as integers `[rows, parts]` that [`LargestNumber::of_keys`] reads.
    ///
    /// Only these integers are sent, and on a GPU one kernel makes them. The numbers stay where they are.
    ///
    /// # Errors
    /// If this is no matrix of floats, or there are 2^31 columns or more.
    ///
    /// [`LargestNumber::of_keys`]: crate::kernels::LargestNumber::of_keys
    #[track_caller]
    pub fn largest_keys(&self) -> Result<Tensor> {
        let &[rows, all] = self.dims() else {
            return Error::op(
                "largest_keys",
                format!("{} is no matrix; expected [rows, columns]", self.spec()),
            );
        };
        let x = self.detach().settled(&[1])?;
        let signature = || {
            let of_pieces = ShardingRule::new(Partial(ReduceOp::Max), &[Shard(1)]);
            let of_rows = ShardingRule::new(Shard(0), &[Shard(0)]);
            Ok(Signature::new(
                [of_rows, of_pieces].into_iter().collect(),
                &[rows, parts_of_row(all)],
                DType::I64,
            ))
        };
        let keys = rules::run("largest_keys", &[], &[&x], signature, |x, _| {
            let first = x[0].spec().local_block()[1].start;
            Ok(largest_keys(x[0].to_local(), first, all)?)
        })?;
        keys.full_tensor()
    }

    /// The largest numbers of each row of a matrix, as f32, with their columns, and what is needed to draw one of them by its weight
    /// e^(number / temperature). Every rank gets all of them, as integers that [`RowCandidates::of_keys`] reads. Rows whose
    /// temperature is 0 have no sum of weights.
    ///
    /// Only these integers are sent, and on a GPU one kernel makes them. The numbers stay where they are.
    ///
    /// # Errors
    /// If this is no matrix of floats, there are not as many temperatures as rows, or 2^31 columns or more.
    ///
    /// [`RowCandidates::of_keys`]: crate::kernels::RowCandidates::of_keys
    #[track_caller]
    pub fn candidate_keys(&self, temperatures: &[f64]) -> Result<Tensor> {
        let &[rows, all] = self.dims() else {
            let reason = format!("{} is no matrix; expected [rows, columns]", self.spec());
            return Error::op("candidate_keys", reason);
        };
        if temperatures.len() != rows {
            let reason = format!("{} temperatures of {rows} rows", temperatures.len());
            return Error::op("candidate_keys", reason);
        }
        let x = self.detach().settled(&[1])?;
        // The outermost axis cuts first.
        let nth = |x: &DTensor| {
            let (shape, coordinate) = (x.mesh().shape(), x.mesh().coordinate());
            let next =
                |[nth, count]: [usize; 2], axis| [nth * shape[axis] + coordinate[axis], count * shape[axis]];
            x.sharded_axes(1).fold([0, 1], next)
        };
        let all_pieces = RowPiece::new(0, nth(&x), all);
        let signature = || {
            let of_pieces = ShardingRule::new(Partial(ReduceOp::Max), &[Shard(1)]);
            let of_rows = ShardingRule::new(Shard(0), &[Shard(0)]);
            Ok(Signature::new(
                [of_rows, of_pieces].into_iter().collect(),
                &[rows, all_pieces.width()],
                DType::I64,
            ))
        };
        let keys = rules::run("candidate_keys", &[], &[&x], signature, |x, _| {
            let block = x[0].spec().local_block();
            let piece = RowPiece::new(block[1].start, nth(&x[0]), all);
            let piece = RowPiece { parts: all_pieces.parts, ..piece };
            Ok(candidate_keys(x[0].to_local(), &temperatures[block[0].clone()], &piece)?)
        })?;
        keys.full_tensor()
    }

    /// The extreme over `dims`, which stay with size 1. Without a gradient the result may be partial.
    #[track_caller]
    pub(super) fn extreme(&self, which: Extreme, dims: &[usize]) -> Result<Self> {
        self.check_elements(which.op(), dims)?;
        if !self.tracked() {
            return self.extreme_of_pieces(which, dims);
        }
        let x = self.settled(dims)?;
        if dims.iter().all(|&d| x.sharded_axes(d).next().is_none()) {
            return x.extreme_of_pieces(which, dims);
        }
        let whole = x.detach().extreme_of_pieces(which, dims)?.resolve_partial()?;
        let signature = || {
            let lies = |d: usize| if dims.contains(&d) { Replicate } else { Shard(d) };
            let rows = (0..x.rank()).map(|d| ShardingRule::new(lies(d), &[Shard(d), lies(d)])).collect();
            Ok(Signature::new(rows, whole.dims(), x.dtype()))
        };
        rules::run("extreme", dims, &[&x, &whole], signature, |x, _| {
            let (x, whole) = (x[0].to_local(), x[1].to_local());
            if x.elem_count() == 0 {
                // Keeps the graph connected, so that all ranks communicate alike in the backward pass.
                let none = whole.zeros_like()?.to_dtype(DType::U8)?;
                return Ok(none.where_cond(&x.sum_keepdim(dims)?, whole)?);
            }
            let own = which.over(x, dims)?;
            Ok(own.detach().eq(whole)?.where_cond(&own, whole)?) // NaN has no gradient
        })
    }

    #[track_caller]
    fn extreme_of_pieces(&self, which: Extreme, dims: &[usize]) -> Result<Self> {
        let signature = || {
            let mut shape = self.dims().to_vec();
            dims.iter().for_each(|&d| shape[d] = 1);
            let mut rows = self.kept_rows(dims);
            if !self.tracked() {
                rows.extend(dims.iter().map(|&d| ShardingRule::new(which.partial(), &[Shard(d)])));
                rows.push(ShardingRule::new(which.partial(), &[which.partial()]));
            }
            Ok(Signature::new(rows, &shape, self.dtype()))
        };
        rules::run(which.op(), dims, &[self], signature, |x, out| {
            let x = x[0].to_local();
            if x.elem_count() == 0 {
                return Ok(which.neutral(&out.local_shape(), x.dtype(), x.device())?);
            }
            Ok(which.over(x, dims)?)
        })
    }

    /// The index of the extreme over a dim, which stays with size 1.
    ///
    /// On a sharded dim the global extreme is found first. Then the ranks that hold it report their indices, and the
    /// first one wins.
    #[track_caller]
    fn place_of_extreme(&self, which: Extreme, op: &'static str, dim: usize) -> Result<Self> {
        self.check_elements(op, &[dim])?;
        let x = self.detach().settled(&[dim])?;
        let mut shape = self.dims().to_vec();
        shape[dim] = 1;
        if x.sharded_axes(dim).next().is_none() {
            let signature = || Ok(Signature::new(x.kept_rows(&[dim]), &shape, DType::U32));
            return rules::run(op, &[dim], &[&x], signature, |x, _| Ok(which.place(x[0].to_local(), dim)?));
        }
        let whole = x.extreme_of_pieces(which, &[dim])?.resolve_partial()?;
        let signature = || {
            let first = ShardingRule::new(Partial(ReduceOp::Min), &[Shard(dim), Replicate]);
            let kept = (0..x.rank())
                .filter(|&d| d != dim)
                .map(|d| ShardingRule::new(Shard(d), &[Shard(d), Shard(d)]));
            Ok(Signature::new(kept.chain([first]).collect(), &shape, DType::U32))
        };
        let found = rules::run(op, &[dim], &[&x, &whole], signature, |x, out| {
            let (start, x, whole) = (x[0].spec().local_block()[dim].start, x[0].to_local(), x[1].to_local());
            let nowhere = empty::full(NOWHERE, out.local_shape().as_slice(), DType::U32, x.device())?;
            if x.elem_count() == 0 {
                return Ok(nowhere);
            }
            let own = which.over(x, &[dim])?;
            // The index of a NaN extreme is that of the first NaN.
            let here = if own.dtype().is_float() {
                (own.eq(whole)? + (own.ne(&own)? * whole.ne(whole)?)?)?
            } else {
                own.eq(whole)?
            };
            Ok(here.where_cond(&which.place(x, dim)?.affine(1.0, start as f64)?, &nowhere)?)
        })?;
        found.resolve_partial()
    }

    #[track_caller]
    fn check_elements(&self, op: &'static str, dims: &[usize]) -> Result<()> {
        match dims.iter().find(|&&d| self.dims()[d] == 0) {
            Some(d) => Error::op(
                op,
                format!("dim {d} of {} has no elements, so no extreme; leave empty tensors out", self.spec()),
            ),
            None => Ok(()),
        }
    }

    /// Rows for each dim but `dims`, sharded in input and output.
    pub(super) fn kept_rows(&self, dims: &[usize]) -> ShardingRules {
        (0..self.rank())
            .filter(|d| !dims.contains(d))
            .map(|d| ShardingRule::new(Shard(d), &[Shard(d)]))
            .collect()
    }

    /// Removes partial placements: shards a dim other than `dims` there, or replicates if no dim is left.
    #[track_caller]
    pub(super) fn settled(&self, dims: &[usize]) -> Result<Self> {
        if !self.placements().iter().any(|p| p.is_partial()) {
            return Ok(self.clone());
        }
        let signature = || {
            let others = dims.iter().map(|&d| ShardingRule::new(Shard(d), &[Shard(d)]));
            Ok(Signature::new(
                self.kept_rows(dims).into_iter().chain(others).collect(),
                self.dims(),
                self.dtype(),
            ))
        };
        rules::run("settle", dims, &[self], signature, |x, _| Ok(x[0].to_local().clone()))
    }
}
