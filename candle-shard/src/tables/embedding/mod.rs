//! Lookup of rows in a sharded table; each rank has its own ids.
//!
//! Two collectives tell each rank which rows the other ranks look up (`inputs.rs`). Rows above the norm limit are
//! scaled in place. One collective sends each rank its rows (`fetch.rs`), each row once, however often it is looked up.
//! The rest is the plain op on one device, so the numbers equal those of one device. The cost grows with
//! the ids, not with the size of the table.
mod fetch;
mod inputs;
mod spread;
mod table;

use crate::kernels::{self, Bags, NOWHERE};
use crate::lookup::{
    ArgumentError, BagOffsets, EmbeddingBagOptions, EmbeddingOptions, check_weights, remember,
};
use crate::{Result, ShardedTensor};
use candle_core::Tensor;
use fetch::{FetchedRows, fetch, limit_norms};
use inputs::{Ids, gather_inputs};
use table::EmbeddingTable;

/// The rows that this rank looks up, each once.
struct UniqueRows {
    rows: Tensor,
    /// For each id the index of its row.
    places: Vec<u32>,
    /// The index of the padding row, if it is looked up.
    padding: Option<u32>,
}

impl ShardedTensor {
    /// Looks up the rows of this table `[rows, width]` at this rank's `ids` (u8, u32 or i64, any shape); returns
    /// `[.., width]`.
    ///
    /// The table is cut by rows or by columns, in any order of the ranks. Every rank of the group must call it, each
    /// with any number of its own ids. Values equal those of one device with the whole table. The gradient of the local
    /// shard is that of the sum of all ranks' losses. As in PyTorch, [`max_norm`](EmbeddingOptions::max_norm) changes
    /// the looked-up rows in the table.
    ///
    /// Runs three collectives, four for `max_norm` on columns, and one in the backward pass.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{ChunkShardingSpec, EmbeddingOptions, Result, ShardedTensor};
    ///
    /// let found = World::threads(2).run(|ctx| -> Result<Vec<Vec<f32>>> {
    ///     let table = Tensor::new(&[[0f32, 1.], [10., 11.], [20., 21.]], &Device::Cpu)?;
    ///     let spec = ChunkShardingSpec::new(0, ["rank:1/cpu", "rank:0/cpu"])?; // rank 1 holds the first rows
    ///     let table = ShardedTensor::shard(&table, &spec, 0, ctx.group())?;
    ///     let ids = Tensor::new([vec![2u32, 0], vec![1]][ctx.rank()].as_slice(), &Device::Cpu)?;
    ///     Ok(table.embedding(&ids, &EmbeddingOptions::default())?.to_vec2()?)
    /// })?;
    /// assert_eq!(found, [vec![[20., 21.], [0., 1.]], vec![[10., 11.]]]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// The same one on all ranks, before anything has changed: if this is not a table of floats cut by rows or columns,
    /// if the options do not fit it or differ among ranks, if `max_norm` would change the result of an op, or if an id
    /// of any rank is outside the table.
    pub fn embedding(&self, ids: &Tensor, options: &EmbeddingOptions) -> Result<Tensor> {
        let (found, ()) = self.find("embedding", ids, options, &format!("{options:?}"), || Ok(()))?;
        let rows = kernels::embedding(&found.rows, found.places, found.padding)?;
        let rows = match ids.rank() {
            1 => rows, // one graph node fewer
            _ => rows.reshape([ids.dims(), &[self.dims()[1]]].concat())?,
        };
        remember(&rows, self.group());
        Ok(rows)
    }

    /// Reduces each of this rank's bags of rows of this table `[rows, width]` to one row; returns `[bags, width]`.
    ///
    /// `ids` (u8, u32 or i64) are `[bags, n]` without `offsets`, or `[n]` with `offsets` `[bags]`, the starts of the
    /// bags. `per_sample_weights` has the shape of the ids and the dtype of the table. It multiplies the rows of a sum
    /// and has a gradient; either all ranks pass it or none. A bag without rows, or with only padding, yields zeros.
    /// Otherwise as [`embedding`](Self::embedding).
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{ChunkShardingSpec, EmbeddingBagOptions, Result, ShardedTensor};
    ///
    /// let found = World::threads(2).run(|ctx| -> Result<Vec<Vec<f32>>> {
    ///     let table = Tensor::new(&[[0f32, 1.], [10., 11.], [20., 21.]], &Device::Cpu)?;
    ///     let spec = ChunkShardingSpec::new(1, ["rank:0/cpu", "rank:1/cpu"])?; // a column each
    ///     let table = ShardedTensor::shard(&table, &spec, 0, ctx.group())?;
    ///     let ids = Tensor::new(&[[0u32, 2], [1, 2]][ctx.rank()], &Device::Cpu)?;
    ///     let offsets = Tensor::new(&[0u32, 0], &Device::Cpu)?; // an empty bag, and one of all ids
    ///     Ok(table.embedding_bag(&ids, Some(&offsets), None, &EmbeddingBagOptions::default())?.to_vec2()?)
    /// })?;
    /// assert_eq!(found, [[[0., 0.], [10., 11.]], [[0., 0.], [15., 16.]]]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`embedding`](Self::embedding); and if offsets do not rise from 0 to at most the number of ids, or
    /// weights do not fit the ids or the mode.
    pub fn embedding_bag(
        &self,
        ids: &Tensor,
        offsets: Option<&Tensor>,
        per_sample_weights: Option<&Tensor>,
        options: &EmbeddingBagOptions,
    ) -> Result<Tensor> {
        let bounds = || {
            let weights = per_sample_weights.map(|weights| (weights.dims(), weights.dtype()));
            check_weights((ids.dims(), self.dtype()), weights, options.mode)?;
            BagOffsets::of(ids, offsets, options.include_last_offset)
        };
        let weighted = if per_sample_weights.is_some() { ", weighted" } else { "" };
        let call = format!("{options:?}{weighted}");
        let (UniqueRows { rows, places, padding }, bounds) =
            self.find("embedding_bag", ids, &options.lookup, &call, bounds)?;
        let counted = places.into_iter().map(|place| if Some(place) == padding { NOWHERE } else { place });
        let bags = Bags::new(counted.collect::<Vec<u32>>(), bounds.0)?;
        let weights = per_sample_weights.map(Tensor::flatten_all).transpose()?;
        let reduced = kernels::embedding_bag(&rows, &bags, options.mode, weights.as_ref())?;
        remember(&reduced, self.group());
        Ok(reduced)
    }

    /// Tells the other ranks which rows this rank looks up, scales those that are too long, and fetches them.
    ///
    /// `call` describes the options, which must be equal on all ranks. `more` checks other arguments of this rank.
    fn find<T>(
        &self,
        op: &'static str,
        ids: &Tensor,
        options: &EmbeddingOptions,
        call: &str,
        more: impl FnOnce() -> Result<T, ArgumentError>,
    ) -> Result<(UniqueRows, T)> {
        let prepare = || {
            let table = EmbeddingTable::of(self)?;
            let (lookup, ids) = (options.checked(table.rows)?, Ids::read(ids, table.rows)?);
            if lookup.renorm.is_some() && table.is_result() {
                let reason =
                    "max_norm changes a table in place, and this one is a result of ops; give a parameter";
                return Err(reason.into());
            }
            Ok((ids, table.tracked(), (table, lookup, more()?)))
        };
        let call =
            format!("with {call} of {}{:?} in {}", self.dtype().as_str(), self.dims(), self.sharding_spec());
        let (ids, inputs, (table, lookup, more)) = gather_inputs(op, self.group(), &call, prepare())?;
        if let Some(limit) = &lookup.renorm {
            limit_norms(&table, &inputs.wanted, limit)?;
        }
        let FetchedRows { rows, order } = fetch(&table, &inputs, lookup.padding)?;
        let padding = lookup.padding.and_then(|padding| ids.wanted.binary_search(&padding).ok());
        let padding = padding.map(|place| order[place]);
        let places = ids.places.iter().map(|&place| order[place as usize]).collect();
        Ok((UniqueRows { rows, places, padding }, more))
    }
}
