//! Rows of a sharded table, looked up by every rank with ids of its own.
//!
//! Two collectives tell every rank which rows the others want (`inputs.rs`); rows that are too long are scaled in place
//! (`renorm.rs`); and one collective brings each rank its rows (`fetch.rs`), each one once however often it is looked
//! up. The rest is the plain op on one device, so the numbers are those of one device. Costs follow the ids, and never
//! the size of the table.
pub(crate) mod bags;
pub(crate) mod fetch;
pub(crate) mod inputs;
pub(crate) mod options;
pub(crate) mod renorm;
mod table;

use crate::kernels::{self, Bags, NOWHERE};
use crate::{Result, ShardedTensor};
use bags::Bounds;
use candle_core::Tensor;
use fetch::{Fetched, fetch};
use inputs::{Ids, Inputs, Tell, Wanted, Wrong, gather_inputs};
use options::{EmbeddingBagOptions, EmbeddingOptions, Lookup};
use table::Table;

/// A call whose arguments are in order on this rank.
struct Prepared<T> {
    table: Table,
    lookup: Lookup,
    ids: Ids,
    more: T,
}

impl<T> Prepared<T> {
    /// The rows that all ranks want go to them; first those too long are scaled.
    fn fetch(&self, inputs: &Inputs) -> Result<Fetched> {
        if let Some(limit) = &self.lookup.renorm {
            renorm::limit_norms(&self.table, &inputs.wanted, limit)?;
        }
        fetch(&self.table, inputs, self.lookup.padding)
    }

    /// The place of the padding row among those that this rank wants.
    fn padding(&self) -> Option<usize> {
        self.ids.wanted.binary_search(&self.lookup.padding?).ok()
    }
}

impl<T> Tell for Prepared<T> {
    fn wanted(&self) -> &Wanted {
        &self.ids.wanted
    }

    fn tracked(&self) -> Option<bool> {
        self.table.tracked()
    }
}

impl ShardedTensor {
    /// The rows of this table `[rows, width]` at this rank's `ids` (u8, u32 or i64, any shape): `[.., width]`.
    ///
    /// The table is cut by rows or by columns, in any order of the ranks. Every rank of the group calls it, with ids of
    /// its own, as many as it likes. Values are those of one device that has the whole table, and the gradient of the
    /// local shard is that of the sum of all ranks' losses. What is in the table of the rows that are looked up changes
    /// with [`max_norm`](EmbeddingOptions::max_norm), as in PyTorch.
    ///
    /// Three collectives, four for `max_norm` on columns; one in the backward pass.
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{ChunkShardingSpec, EmbeddingOptions, Result, ShardedTensor};
    ///
    /// let found = World::local(2).run(|ctx| -> Result<Vec<Vec<f32>>> {
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
    /// The same one on all ranks, before anything has changed: if this is no table of floats cut by rows or columns, if
    /// options do not fit it or differ among ranks, if `max_norm` would change a result of ops, or if an id of any rank
    /// is no row.
    pub fn embedding(&self, ids: &Tensor, options: &EmbeddingOptions) -> Result<Tensor> {
        const OP: &str = "embedding";
        let prepare = || self.prepare(ids, options, || Ok(()));
        let call = self.call(&format!("{options:?}"));
        let (call, inputs) = gather_inputs(OP, self.group(), &call, prepare())?;
        let Fetched { rows, order } = call.fetch(&inputs)?;
        let places: Vec<u32> = call.ids.places.iter().map(|&place| order[place as usize]).collect();
        let still = call.padding().map(|padding| order[padding]);
        let found = kernels::embedding(&rows, places, still)?;
        match ids.rank() {
            1 => Ok(found), // a node less in the graph
            _ => Ok(found.reshape([ids.dims(), &[self.dims()[1]]].concat())?),
        }
    }

    /// One row for each of this rank's bags of rows of this table `[rows, width]`: `[bags, width]`.
    ///
    /// `ids` (u8, u32 or i64) are `[bags, n]` without `offsets`, or `[n]` with the `offsets` `[bags]` at which the bags
    /// begin. `per_sample_weights`, of the shape of the ids and the dtype of the table, multiply the rows of a sum and
    /// have a gradient; all ranks give them, or none does. A bag without rows, or with nothing but padding, gives zeros. Else as
    /// [`embedding`](Self::embedding).
    ///
    /// ```
    /// use candle_core::{Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{ChunkShardingSpec, EmbeddingBagOptions, Result, ShardedTensor};
    ///
    /// let found = World::local(2).run(|ctx| -> Result<Vec<Vec<f32>>> {
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
    /// Like [`embedding`](Self::embedding); and if offsets do not rise from 0 to at most the number of ids, or weights
    /// do not fit the ids or the mode.
    pub fn embedding_bag(
        &self,
        ids: &Tensor,
        offsets: Option<&Tensor>,
        per_sample_weights: Option<&Tensor>,
        options: &EmbeddingBagOptions,
    ) -> Result<Tensor> {
        const OP: &str = "embedding_bag";
        let more = || {
            let weights = per_sample_weights.map(|weights| (weights.dims(), weights.dtype()));
            bags::check_weights((ids.dims(), self.dtype()), weights, options.mode)?;
            Bounds::of(ids, offsets, options.include_last_offset)
        };
        let weighted = if per_sample_weights.is_some() { ", weighted" } else { "" };
        let call = self.call(&format!("{options:?}{weighted}"));
        let prepared = self.prepare(ids, &options.lookup, more);
        let (call, inputs) = gather_inputs(OP, self.group(), &call, prepared)?;
        let Fetched { rows, order } = call.fetch(&inputs)?;
        let padding = call.padding();
        let place = |&place: &u32| if Some(place as usize) == padding { NOWHERE } else { order[place as usize] };
        let bags = Bags::new(call.ids.places.iter().map(place).collect::<Vec<u32>>(), call.more.0)?;
        let weights = per_sample_weights.map(Tensor::flatten_all).transpose()?;
        Ok(kernels::embedding_bag(&rows, &bags, options.mode, weights.as_ref())?)
    }

    /// What must be alike on all ranks.
    fn call(&self, options: &str) -> String {
        format!("with {options} of {}{:?} in {}", self.dtype().as_str(), self.dims(), self.sharding_spec())
    }

    fn prepare<T>(
        &self,
        ids: &Tensor,
        options: &EmbeddingOptions,
        more: impl FnOnce() -> Result<T, Wrong>,
    ) -> Result<Prepared<T>, Wrong> {
        let table = Table::of(self)?;
        let (lookup, ids) = (options.checked(table.rows)?, Ids::read(ids, table.rows)?);
        if lookup.renorm.is_some() && table.is_result() {
            return Err("max_norm changes a table in place, and this one is a result of ops; give a parameter".into());
        }
        let more = more()?;
        Ok(Prepared { table, lookup, ids, more })
    }
}
