//! Scatter ops: elements are written or added at indexes of dims that may be sharded.
//!
//! A rank that holds a shard of the indexed dim applies the elements that belong there and ignores the rest.
use super::lookup::{check_indexes, checked, held, places};
use crate::kernels::NOWHERE;
use crate::layout::{Placement, Replicate, Shard};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::shape::Dim;
use candle_core::{DType, Shape, Tensor};
use candle_dist::empty;

const SUM: Placement = Placement::PARTIAL_SUM;

impl DTensor {
    /// Returns a copy with each element of `source` added at its index of a dim.
    ///
    /// `indexes` (u8, u32 or i64) has the shape of `source`, which may differ from the tensor's in the dim only: for
    /// dim 1, `source[i, j, k]` goes to `[i, indexes[i, j, k], k]`. Both gradients are correct, unlike those of
    /// candle's `scatter_add`.
    ///
    /// # Errors
    /// Those of [`embedding`](Self::embedding).
    #[track_caller]
    pub fn scatter_add(&self, indexes: &Self, source: &Self, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "scatter_add")?;
        let signature = || {
            let mut rows = self.scatter_rows("scatter_add", indexes, source, dim)?;
            rows.push(ShardingRule::new(SUM, &[SUM, Shard(dim), Shard(dim)]));
            Ok(Signature::new(rows, self.dims(), self.dtype()))
        };
        let made = rules::run("scatter_add", &[dim], &[self, indexes, source], signature, |x, _| {
            let (base, source) = (x[0].to_local(), x[2].to_local().flatten_all()?.contiguous()?);
            let places = flat(&places("scatter_add", [indexes, &x[1]], &x[0], dim)?, base.dims(), dim);
            let places = Tensor::from_vec(places, source.dims(), base.device())?;
            Ok(whole_memory(&base.flatten_all()?)?.index_add(&places, &source, 0)?.reshape(base.shape())?)
        })?;
        checked("scatter_add", made, indexes, self, dim)
    }

    /// Returns a copy with each element of `source` written at its index of a dim.
    ///
    /// Shapes are those of [`scatter_add`](Self::scatter_add). Where several elements go to one place, the last one
    /// wins, and all of them get its gradient.
    ///
    /// # Errors
    /// Those of [`embedding`](Self::embedding).
    #[track_caller]
    pub fn scatter(&self, indexes: &Self, source: &Self, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "scatter")?;
        let signature = || {
            Ok(Signature::new(self.scatter_rows("scatter", indexes, source, dim)?, self.dims(), self.dtype()))
        };
        let made = rules::run("scatter", &[dim], &[self, indexes, source], signature, |x, _| {
            let (base, source) = (x[0].to_local(), x[2].to_local().contiguous()?);
            let held = held("scatter", [indexes, &x[1]], &x[0], dim)?;
            let marks = Tensor::zeros(source.shape(), DType::U8, base.device())?;
            let kept =
                empty::full(1u8, base.shape(), DType::U8, base.device())?.scatter(&held, &marks, dim)?;
            let put = base.zeros_like()?.scatter(&held, &source, dim)?;
            Ok(kept.where_cond(base, &put)?) // the order of the inputs: that of the backward passes on all ranks
        })?;
        checked("scatter", made, indexes, self, dim)
    }

    /// Returns a copy with slice `i` of `source` along a dim added to slice `indexes[i]` (u8, u32 or i64).
    ///
    /// # Errors
    /// Those of [`embedding`](Self::embedding).
    #[track_caller]
    pub fn index_add(&self, indexes: &Self, source: &Self, dim: impl Dim) -> Result<Self> {
        let dim = dim.to_index(&Shape::from(self.dims()), "index_add")?;
        let signature = || {
            self.check_source("index_add", source, dim)?;
            check_indexes("index_add", indexes)?;
            if indexes.dims() != &source.dims()[dim..=dim] {
                let reason = format!("indexes {} for dim {dim} of {}", indexes.spec(), source.spec());
                return Error::op("index_add", format!("{reason}: expected one for each slice"));
            }
            let others = (0..self.rank()).filter(|&d| d != dim);
            let mut rows: ShardingRules =
                others.map(|d| ShardingRule::new(Shard(d), &[Shard(d), Replicate, Shard(d)])).collect();
            rows.extend([
                ShardingRule::new(Shard(dim), &[Shard(dim), Replicate, Replicate]),
                ShardingRule::new(SUM, &[SUM, Replicate, SUM]),
                ShardingRule::new(SUM, &[SUM, Shard(0), Shard(dim)]),
            ]);
            Ok(Signature::new(rows, self.dims(), self.dtype()))
        };
        let made = rules::run("index_add", &[dim], &[self, indexes, source], signature, |x, _| {
            let source = x[2].to_local().contiguous()?;
            let held = held("index_add", [indexes, &x[1]], &x[0], dim)?;
            Ok(whole_memory(x[0].to_local())?.index_add(&held, &source, dim)?)
        })?;
        checked("index_add", made, indexes, self, dim)
    }

    /// The rows of an op that puts `source` at `indexes` of the same shape.
    #[track_caller]
    fn scatter_rows(
        &self,
        op: &'static str,
        indexes: &Self,
        source: &Self,
        dim: usize,
    ) -> Result<ShardingRules> {
        self.check_source(op, source, dim)?;
        check_indexes(op, indexes)?;
        if indexes.dims() != source.dims() {
            let reason =
                format!("indexes {} for {}: expected one for each element", indexes.spec(), source.spec());
            return Error::op(op, reason);
        }
        let others = (0..self.rank()).filter(|&d| d != dim);
        let mut rows: ShardingRules =
            others.map(|d| ShardingRule::new(Shard(d), &[Shard(d), Shard(d), Shard(d)])).collect();
        rows.extend([
            ShardingRule::new(Shard(dim), &[Shard(dim), Replicate, Replicate]),
            ShardingRule::new(SUM, &[SUM, Replicate, SUM]),
        ]);
        Ok(rows)
    }

    #[track_caller]
    fn check_source(&self, op: &'static str, source: &Self, dim: usize) -> Result<()> {
        let alike = |d: usize| d == dim || source.dims()[d] == self.dims()[d];
        let fits = source.rank() == self.rank() && (0..self.rank()).all(alike);
        if fits && source.dtype() == self.dtype() {
            return Ok(());
        }
        let reason = format!(
            "{} for {}: expected its dtype, and its dims except dim {dim}",
            source.spec(),
            self.spec()
        );
        Error::op(op, reason)
    }
}

/// Returns the tensor in memory that is all its own, if it is on a GPU.
///
/// candle's `index_add` there applies the layout of a view to the copy that it adds to: it refuses strides, and an offset is
/// a panic.
fn whole_memory(x: &Tensor) -> candle_core::Result<Tensor> {
    let is_whole = x.is_contiguous() && x.storage_and_layout().1.start_offset() == 0;
    if x.device().is_cpu() || is_whole { Ok(x.clone()) } else { x.force_contiguous() }
}

/// Converts indexes of dim `dim` of a tensor of shape `dims` to indexes of the flat tensor.
///
/// There is one index per element of a tensor whose shape may differ in that dim.
fn flat(places: &[u32], dims: &[usize], dim: usize) -> Vec<i64> {
    let (outer, inner): (usize, usize) = (dims[..dim].iter().product(), dims[dim + 1..].iter().product());
    let block = places.len() / outer.max(1);
    let at = |(i, &place): (usize, &u32)| match place {
        NOWHERE => i64::MAX,
        place => ((i / block * dims[dim] + place as usize) * inner + i % inner) as i64,
    };
    places.iter().enumerate().map(at).collect()
}
