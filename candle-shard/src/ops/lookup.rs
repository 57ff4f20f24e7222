//! Lookup of elements by index, along dims that may be sharded.
//!
//! A rank that holds a shard of the indexed dim finds the elements it holds, and zeros for the others: the result is a
//! partial sum.
use crate::agreement::{refuse_data, was_cut};
use crate::kernels::{self, NOWHERE};
use crate::layout::{Placement, Replicate, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::shape::Dim;
use candle_core::{DType, Shape, Tensor, TensorId};
use candle_dist::empty;
use std::cell::RefCell;
use std::ops::Range;
use std::rc::Rc;

const SUM: Placement = Placement::PARTIAL_SUM;

impl DTensor {
    /// Selects the elements of a dim at `indexes` (u8, u32 or i64, `[n]`). The dim then has size `n`.
    ///
    /// # Errors
    /// If an index is out of bounds. Each rank checks its indexes against the global size. A wrong one in a shard of
    /// the indexes stops the world, with the same error on all ranks.
    #[track_caller]
    pub fn index_select(&self, indexes: &Self, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "index_select")?;
        if indexes.rank() != 1 {
            return Error::op("index_select", format!("indexes {}: expected [n]", indexes.spec()));
        }
        self.take("index_select", indexes, dim, None)
    }

    /// Replaces dim `dim` by the dims of `ids`; row `still` of a table gets no gradient.
    #[track_caller]
    pub(super) fn take(&self, op: &'static str, ids: &Self, dim: usize, still: Option<u32>) -> Result<Self> {
        let signature = || {
            check_indexes(op, ids)?;
            let mut rows: ShardingRules =
                (0..ids.rank()).map(|d| ShardingRule::new(Shard(dim + d), &[Replicate, Shard(d)])).collect();
            let place = |d: usize| if d < dim { d } else { d + ids.rank() - 1 };
            let others = (0..self.rank()).filter(|&d| d != dim);
            rows.extend(others.map(|d| ShardingRule::new(Shard(place(d)), &[Shard(d), Replicate])));
            rows.extend([
                ShardingRule::new(SUM, &[Shard(dim), Replicate]),
                ShardingRule::new(SUM, &[SUM, Replicate]),
            ]);
            let shape = [&self.dims()[..dim], ids.dims(), &self.dims()[dim + 1..]].concat();
            Ok(Signature::new(rows, &shape, self.dtype()))
        };
        let found = rules::run(op, &[dim], &[self, ids], signature, |x, out| {
            let (table, part) = (x[0].to_local(), &x[0].spec().local_block()[dim]);
            let places = places(op, [ids, &x[1]], &x[0], dim)?;
            let found = if self.rank() == 2 && dim == 0 && self.dtype().is_float() {
                let still =
                    still.filter(|&row| part.contains(&(row as usize))).map(|row| row - part.start as u32);
                kernels::embedding(table, places, still)?
            } else {
                empty::index_select(table, &places, dim)?
            };
            Ok(found.reshape(out.local_shape().as_slice())?)
        })?;
        checked(op, found, ids, self, dim)
    }

    /// Gathers the elements of a dim at `indexes` (u8, u32 or i64), which have the shape of the result.
    ///
    /// For dim 1, element `[i, j, k]` is the one at `[i, indexes[i, j, k], k]`. In the other dims the indexes may be
    /// smaller than the tensor.
    ///
    /// # Errors
    /// Those of [`index_select`](Self::index_select).
    #[track_caller]
    pub fn gather(&self, indexes: &Self, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "gather")?;
        let others = |d: &usize| *d != dim;
        let fits = |d: usize| indexes.dims()[d] <= self.dims()[d];
        if indexes.rank() != self.rank() || !(0..self.rank()).filter(others).all(fits) {
            let reason = format!("indexes {} for dim {dim} of {}", indexes.spec(), self.spec());
            return Error::op(
                "gather",
                format!("{reason}: expected as many dims, with the others no larger"),
            );
        }
        let cut = |x: Self, d: usize| x.narrow(d, 0, indexes.dims()[d]);
        let source = (0..self.rank()).filter(others).try_fold(self.clone(), cut)?;
        let signature = || {
            check_indexes("gather", indexes)?;
            let alike =
                (0..self.rank()).filter(others).map(|d| ShardingRule::new(Shard(d), &[Shard(d), Shard(d)]));
            let rows = alike.chain([
                ShardingRule::new(Shard(dim), &[Replicate, Shard(dim)]),
                ShardingRule::new(SUM, &[Shard(dim), Replicate]),
                ShardingRule::new(SUM, &[SUM, Replicate]),
            ]);
            Ok(Signature::new(rows.collect(), indexes.dims(), self.dtype()))
        };
        let found = rules::run("gather", &[dim], &[&source, indexes], signature, |x, _| {
            let held = held("gather", [indexes, &x[1]], &x[0], dim)?;
            Ok(x[0].to_local().contiguous()?.gather(&held, dim)?)
        })?;
        checked("gather", found, indexes, self, dim)
    }
}

/// Refuses tensors that are not u8, u32 or i64.
pub(super) fn check_indexes(op: &'static str, indexes: &DTensor) -> Result<()> {
    if matches!(indexes.dtype(), DType::U8 | DType::U32 | DType::I64) {
        return Ok(());
    }
    Error::op(op, format!("ids {}: expected u8, u32 or i64", indexes.spec()))
}

/// Returns `made`, and checks the indexes of a dim of `x` also on ranks where the result has no elements.
pub(super) fn checked(
    op: &'static str,
    made: DTensor,
    indexes: &DTensor,
    x: &DTensor,
    dim: usize,
) -> Result<DTensor> {
    let read = made.to_local().elem_count() > 0 || indexes.placements().iter().any(|p| p.is_partial());
    if !read {
        places(op, [indexes, indexes], x, dim)?;
    }
    Ok(made)
}

/// The local indexes of a dim of `x` as offsets into this rank's shard, or [`NOWHERE`]. The pair is the indexes as
/// given, and as laid out by the op.
pub(super) fn held(op: &'static str, indexes: [&DTensor; 2], x: &DTensor, dim: usize) -> Result<Tensor> {
    Ok(Tensor::from_vec(places(op, indexes, x, dim)?, indexes[1].to_local().shape(), x.device())?)
}

/// Like [`held`], as a list in row-major order.
pub(super) fn places(op: &'static str, indexes: [&DTensor; 2], x: &DTensor, dim: usize) -> Result<Vec<u32>> {
    let size = x.dims()[dim];
    let part: Range<usize> = x.spec().local_block()[dim].clone();
    let place = |index: i64| {
        let inside = usize::try_from(index).ok().filter(|&index| index < size);
        let inside = inside.ok_or_else(|| outside(index, dim, size))?;
        Ok(if part.contains(&inside) { (inside - part.start) as u32 } else { NOWHERE })
    };
    read_indexes(op, indexes, place)
}

/// The message for an index that is out of bounds.
pub(super) fn outside(index: i64, dim: usize, size: usize) -> String {
    format!("index {index} is outside of dim {dim} of size {size}")
}

/// Local indexes that the host has read, by tensor. Each copy from a device makes the host wait.
#[derive(Default)]
pub(super) struct Indexes(RefCell<Vec<(TensorId, Rc<[i64]>)>>);

impl Indexes {
    /// Returns this rank's indexes in row-major order.
    fn of(&self, indexes: &DTensor) -> Result<Rc<[i64]>> {
        let local = indexes.to_local();
        if let Some((_, read)) = self.0.borrow().iter().find(|(id, _)| *id == local.id()) {
            return Ok(read.clone());
        }
        let read = indexes.mesh().to_host(&local.flatten_all()?)?;
        let read: Rc<[i64]> = read.to_dtype(DType::I64)?.to_vec1::<i64>()?.into();
        self.0.borrow_mut().push((local.id(), read.clone()));
        Ok(read)
    }
}

/// Applies `read` to each local index, in row-major order. The pair is the indexes as given, and as laid out by the op.
///
/// The only place where data decides whether an op is valid. Indexes that were given whole, and that the op cut, are
/// checked whole first, so that all ranks refuse the same index.
pub(crate) fn read_indexes<T>(
    op: &'static str,
    indexes: [&DTensor; 2],
    read: impl Fn(i64) -> std::result::Result<T, String>,
) -> Result<Vec<T>> {
    read_indexes_once(op, indexes, &Indexes::default(), read)
}

/// Like [`read_indexes`], for ops that read the same indexes several times while they do not change.
pub(super) fn read_indexes_once<T>(
    op: &'static str,
    [given, laid]: [&DTensor; 2],
    known: &Indexes,
    read: impl Fn(i64) -> std::result::Result<T, String>,
) -> Result<Vec<T>> {
    let all = |indexes: &DTensor| -> Result<Vec<T>> {
        let read: std::result::Result<Vec<T>, String> =
            known.of(indexes)?.iter().map(|&index| read(index)).collect();
        read.or_else(|reason| refuse_data(op, reason, indexes.spec()))
    };
    if was_cut(given.spec(), laid.spec()) {
        all(given)?;
    }
    all(laid)
}
