//! Lookups of table rows, singly or in bags, and max-norm in place.
use super::lookup::{check_indexes, checked, outside, read_indexes};
use crate::agreement::Frequency;
use crate::kernels::{self, BagMode, Bags, NOWHERE};
use crate::layout::{Placement, Replicate, Shard};
use crate::lookup::{BagOffsets, EmbeddingBagOptions, EmbeddingOptions, Renorm, check_weights, limit_rows};
use crate::rules::{self, ShardingRule, ShardingRules, Signature};
use crate::{DTensor, Error, Result};
use candle_core::{DType, Tensor};
use std::borrow::Cow;

const SUM: Placement = Placement::PARTIAL_SUM;

impl DTensor {
    /// The rows of this table `[rows, width]` at `ids` (u8, u32 or i64, any shape): `[.., width]`.
    ///
    /// A table sharded by columns needs no communication. A table sharded by rows gives partial sums: each rank adds
    /// the rows that it holds, and zeros elsewhere.
    ///
    /// # Errors
    /// If an id is not a row of the table. Each rank checks its ids against the global number of rows. A wrong id in a
    /// shard of the ids stops the world, with the same error on all ranks.
    #[track_caller]
    pub fn embedding(&self, ids: &Self) -> Result<Self> {
        self.embedding_with(ids, &EmbeddingOptions::default())
    }

    /// Like [`embedding`](Self::embedding), with a padding row without gradient, or with max-norm applied first.
    ///
    /// With `max_norm` the table must be a parameter; see [`embedding_renorm`](Self::embedding_renorm), where all ranks
    /// refuse wrong ids.
    #[track_caller]
    pub fn embedding_with(&self, ids: &Self, options: &EmbeddingOptions) -> Result<Self> {
        const OP: &str = "embedding";
        self.check_table(OP)?;
        let lookup = options.checked(self.dims()[0]).or_else(|reason| Error::op(OP, reason))?;
        if let Some(limit) = &lookup.renorm {
            self.limit_norms(OP, ids, limit)?;
        }
        self.take(OP, ids, 0, lookup.padding)
    }

    /// Reduces each bag of rows of this table `[rows, width]` to one row: `[bags, width]`.
    ///
    /// `ids` (u8, u32 or i64) are `[bags, n]`, or `[n]` with `offsets` `[bags]`, the index of the first id of each bag.
    /// `per_sample_weights` multiply the rows of a sum. They have the shape of the ids and the dtype of the table; all
    /// ranks give them, or none does. A bag that is empty or all padding yields zeros. Bags `[bags, n]` may be sharded.
    /// A table sharded by rows gives partial sums; for maxima the rows that are looked up are gathered first.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{DTensor, EmbeddingBagOptions, Replicate, Result, Shard};
    ///
    /// let means = World::threads(2).run(|ctx| -> Result<Vec<Vec<f32>>> {
    ///     let mesh = ctx.mesh(&[("tp", 2)])?;
    ///     let table = Tensor::new(&[[0f32, 1.], [10., 11.], [20., 21.]], &Device::Cpu)?;
    ///     let table = DTensor::distribute(&table, &mesh, &[Shard(0)])?;
    ///     let ids = Tensor::new(&[[0u32, 2], [1, 1]], &Device::Cpu)?;
    ///     let ids = DTensor::distribute(&ids, &mesh, &[Replicate])?;
    ///     Ok(table.embedding_bag(&ids, None, None, &EmbeddingBagOptions::default())?.full_tensor()?.to_vec2()?)
    /// })?;
    /// assert_eq!(means[0], [[10., 11.], [10., 11.]]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`embedding_with`](Self::embedding_with), and one if offsets do not rise from 0 to at most the number
    /// of ids, or weights do not fit the ids or the mode.
    #[track_caller]
    pub fn embedding_bag(
        &self,
        ids: &Self,
        offsets: Option<&Self>,
        per_sample_weights: Option<&Self>,
        options: &EmbeddingBagOptions,
    ) -> Result<Self> {
        const OP: &str = "embedding_bag";
        self.check_table(OP)?;
        let lookup = options.lookup.checked(self.dims()[0]).or_else(|reason| Error::op(OP, reason))?;
        if let Some(limit) = &lookup.renorm {
            self.limit_norms(OP, ids, limit)?;
        }
        if options.mode == BagMode::Max && self.sharded_axes(0).next().is_some() {
            let (rows, ids, padding) = self.rows_apart(OP, ids, lookup.padding)?;
            return rows.bags(&ids, offsets, per_sample_weights, options, padding);
        }
        self.bags(ids, offsets, per_sample_weights, options, lookup.padding)
    }

    /// Multiplies the rows at `ids` whose `norm_type`-norm is above `max_norm` by `max_norm / (norm + 1e-7)`, in place
    /// and without a gradient: PyTorch's `embedding_renorm_`.
    ///
    /// The table must be a parameter, or have no gradient. Only the rows at the ids of all ranks are read, and only
    /// rows that are too long are written. Sharded ids are gathered; a table sharded by columns needs one small
    /// all_reduce.
    ///
    /// # Errors
    /// If an id is not a row, or `max_norm` or `norm_type` is invalid. The error is the same on all ranks, and nothing
    /// has changed.
    #[track_caller]
    pub fn embedding_renorm(&self, ids: &Self, max_norm: f64, norm_type: f64) -> Result<()> {
        const OP: &str = "embedding_renorm";
        self.check_table(OP)?;
        let options = EmbeddingOptions::default().max_norm(max_norm).norm_type(norm_type);
        let lookup = options.checked(self.dims()[0]).or_else(|reason| Error::op(OP, reason))?;
        lookup.renorm.iter().try_for_each(|limit| self.limit_norms(OP, ids, limit))
    }

    #[track_caller]
    fn check_table(&self, op: &'static str) -> Result<()> {
        if self.rank() != 2 {
            return Error::op(op, format!("a table {}: expected [rows, width]", self.spec()));
        }
        Ok(())
    }

    #[track_caller]
    fn limit_norms(&self, op: &'static str, ids: &Self, limit: &Renorm) -> Result<()> {
        self.check_float(op)?;
        rules::check_meshes(op, &[self, ids])?;
        if self.placements().iter().any(|p| p.is_partial())
            || self.tracked() && !self.to_local().is_variable()
        {
            let reason = format!("max_norm changes a table in place, and {} is a result of ops", self.spec());
            return Error::op(op, format!("{reason}; give a parameter"));
        }
        let wanted = kernels::unique_rows(&self.all_ids(op, ids)?);
        let [part, _] = self.parts();
        let mine = wanted.into_iter().filter(|&id| part.contains(&(id as usize)));
        let rows: Vec<u32> = mine.map(|id| id - part.start as u32).collect();
        let group = |axis: usize| Ok(self.described(self.mesh().axis_group(axis)?.clone(), 1 << axis));
        let groups = self.sharded_axes(1).map(group).collect::<Result<Vec<_>>>()?;
        limit_rows(self.to_local(), &rows, limit, &groups)
    }

    /// The range of each dim of a table that this rank holds.
    fn parts(&self) -> [std::ops::Range<usize>; 2] {
        let block = self.spec().local_block();
        [block[0].clone(), block[1].clone()]
    }

    /// Gathers the ids of all ranks and checks that they are rows of this table.
    #[track_caller]
    fn all_ids(&self, op: &'static str, ids: &Self) -> Result<Vec<u32>> {
        check_indexes(op, ids)?;
        let whole = rules::lay_out(op, ids, |_| Replicate)?;
        read_ids(op, [&whole, &whole], self.dims()[0])
    }

    /// Gathers the rows that are looked up, with columns still sharded, and renumbers the ids and the padding.
    #[track_caller]
    fn rows_apart(
        &self,
        op: &'static str,
        ids: &Self,
        padding: Option<u32>,
    ) -> Result<(Self, Self, Option<u32>)> {
        let wanted = kernels::unique_rows(&self.all_ids(op, ids)?);
        let signature = || {
            let rows = (0..ids.rank()).map(|d| ShardingRule::new(Shard(d), &[Shard(d)])).collect();
            Ok(Signature::new(rows, ids.dims(), DType::U32))
        };
        let places = rules::run("rows_apart", &[], &[ids], signature, |x, out| {
            let local = read_ids(op, [ids, &x[0]], self.dims()[0])?;
            let places = local.into_iter().map(|id| wanted.binary_search(&id).unwrap_or_default() as u32);
            Ok(Tensor::from_vec(places.collect(), out.local_shape().as_slice(), ids.device())?)
        })?;
        let padding =
            padding.and_then(|padding| wanted.binary_search(&padding).ok()).map(|place| place as u32);
        let wanted = Tensor::from_slice(&wanted, wanted.len(), self.device())?;
        let wanted = Self::everywhere(&wanted, self.mesh(), Frequency::OnDemand)?;
        let rows = self.embedding(&wanted)?.placed(resolved)?;
        Ok((rows, places, padding))
    }

    #[track_caller]
    fn bags(
        &self,
        ids: &Self,
        offsets: Option<&Self>,
        weights: Option<&Self>,
        options: &EmbeddingBagOptions,
        padding: Option<u32>,
    ) -> Result<Self> {
        const OP: &str = "embedding_bag";
        check_indexes(OP, ids)?;
        let (mode, last) = (options.mode, options.include_last_offset);
        let count = bag_count(ids, offsets, weights, options, self.dtype())
            .or_else(|reason| Error::op(OP, reason))?;
        // All ranks read these, also ranks without elements of the result.
        let bounds = |offsets: &Self| {
            let offsets = rules::lay_out(OP, offsets, |_| Replicate)?;
            BagOffsets::between(offsets.to_local(), ids.elem_count(), last)
                .or_else(|reason| Error::op(OP, reason))
        };
        let bounds = offsets.map(bounds).transpose()?;
        let inputs: Vec<&Self> = [Some(self), Some(ids), weights].into_iter().flatten().collect();
        let attributes = [mode as usize, count, usize::from(bounds.is_some()), weights.map_or(0, |_| 1)];
        let signature = || {
            self.check_float(OP)?;
            // Ids and weights are whole, or sharded alike.
            let row = |out: Placement, table: Placement, others: Placement| {
                let ins: Vec<Placement> =
                    std::iter::once(table).chain(inputs[1..].iter().map(|_| others)).collect();
                ShardingRule::new(out, &ins)
            };
            let mut rows: ShardingRules = [row(Shard(1), Shard(1), Replicate)].into_iter().collect();
            rows.extend(offsets.is_none().then(|| row(Shard(0), Replicate, Shard(0))));
            if mode != BagMode::Max {
                rows.extend([row(SUM, Shard(0), Replicate), row(SUM, SUM, Replicate)]);
            }
            Ok(Signature::new(rows, &[count, self.dims()[1]], self.dtype()))
        };
        let made = rules::run(OP, &attributes, &inputs, signature, |x, _| {
            let even = || BagOffsets::even(x[1].to_local().dims());
            let bounds =
                bounds.as_ref().map_or_else(|| Cow::Owned(even().0), |bounds| Cow::Borrowed(&bounds.0));
            let ids = read_ids(OP, [ids, &x[1]], self.dims()[0])?;
            let [part, _] = x[0].parts();
            let counts = |id: u32| Some(id) != padding;
            let place = |&id: &u32| match counts(id) && part.contains(&(id as usize)) {
                true => id - part.start as u32,
                false => NOWHERE,
            };
            let bags = Bags::new(ids.iter().map(place).collect::<Vec<_>>(), &bounds[..])?;
            let weights = weights.map(|_| x[2].to_local().flatten_all()).transpose()?;
            let (table, weights) = (x[0].to_local(), weights.as_ref());
            if mode != BagMode::Mean {
                return Ok(kernels::embedding_bag(table, &bags, mode, weights)?);
            }
            // Each rank has its part of the sum, and the count over all ranks. A sum may be too large for 16 bits.
            let sums = kernels::wide_embedding_bag(table, &bags, BagMode::Sum, None)?;
            let counted =
                |pair: &[usize]| ids[pair[0]..pair[1]].iter().filter(|&&id| counts(id)).count().max(1) as f64;
            let divisors: Vec<f64> = bounds.windows(2).map(counted).collect();
            let divisors =
                Tensor::from_vec(divisors, (bounds.len() - 1, 1), sums.device())?.to_dtype(sums.dtype())?;
            Ok(sums.broadcast_div(&divisors)?.to_dtype(table.dtype())?)
        })?;
        checked(OP, made, ids, self, 0)
    }
}

/// Replicates partial sums; other placements stay.
fn resolved(_: usize, placement: Placement) -> Placement {
    if placement.is_partial() { Replicate } else { placement }
}

/// Reads ids in row-major order and checks that they are rows of a table of `rows` rows. The pair is the ids as given,
/// and as laid out by an op.
fn read_ids(op: &'static str, ids: [&DTensor; 2], rows: usize) -> Result<Vec<u32>> {
    let row = |id: i64| u32::try_from(id).ok().filter(|&row| (row as usize) < rows);
    read_indexes(op, ids, |id| row(id).ok_or_else(|| outside(id, 0, rows)))
}

/// Returns the number of bags, or refuses shapes that make none.
fn bag_count(
    ids: &DTensor,
    offsets: Option<&DTensor>,
    weights: Option<&DTensor>,
    options: &EmbeddingBagOptions,
    dtype: DType,
) -> std::result::Result<usize, String> {
    check_weights(
        (ids.dims(), dtype),
        weights.map(|weights| (weights.dims(), weights.dtype())),
        options.mode,
    )?;
    BagOffsets::count(
        ids.dims(),
        offsets.map(|offsets| (offsets.dims(), offsets.dtype())),
        options.include_last_offset,
    )
}
