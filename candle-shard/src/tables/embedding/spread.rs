//! Lookup by ids that are a distributed tensor.
use crate::layout::{Replicate, Spec};
use crate::lookup::{EmbeddingOptions, spans};
use crate::{DTensor, Error, Result, ShardedTensor};

impl ShardedTensor {
    /// Looks up the rows of this table `[rows, width]` at `ids` (u8, u32 or i64, any shape): `[.., width]`, in the layout of the ids.
    ///
    /// It is [`embedding`](Self::embedding) for a model on a mesh: each rank looks up its part of the ids, which the ranks of an axis
    /// may also have alike. The gradient of the table is that of one device, because an id that several ranks have counts once.
    /// Every rank of the table's group calls it.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::World;
    /// use candle_shard::{ChunkShardingSpec, DTensor, EmbeddingOptions, Replicate, Result, Shard, ShardedTensor};
    ///
    /// let grads = World::threads(4).run(|ctx| -> Result<Vec<f32>> {
    ///     let mesh = ctx.mesh(&[("dp", 2), ("tp", 2)])?;
    ///     let spec = ChunkShardingSpec::on_ranks(0, 0..4)?; // a row on each rank
    ///     let table = ShardedTensor::zeros(&spec, (4, 1), DType::F32, &Device::Cpu, ctx.group())?;
    ///     let (table, vars) = table.to_var()?;
    ///     let ids = DTensor::distribute(&Tensor::new(&[0u32, 0, 1, 3], &Device::Cpu)?, &mesh, &[Shard(0), Replicate])?;
    ///     let found = table.lookup(&ids, &EmbeddingOptions::default())?; // two rows on each rank
    ///     let grads = found.sum_all()?.backward()?;
    ///     let grad = grads.get(&vars[0]).expect("the rank holds a row").flatten_all()?;
    ///     Ok(grad.to_vec1::<f32>()?)
    /// })?;
    /// assert_eq!(grads.concat(), [2., 1., 0., 1.]);
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// If the ids are a partial result, and those of [`embedding`](Self::embedding).
    #[track_caller]
    pub fn lookup(&self, ids: &DTensor, options: &EmbeddingOptions) -> Result<DTensor> {
        let (given, mesh) = (ids.spec(), ids.mesh());
        if let Some(p) = given.placements().iter().find(|p| p.is_partial()) {
            return Error::op(
                "lookup",
                format!("ids {given} are {p}, not yet numbers of rows; redistribute them first"),
            );
        }
        let rows = self.embedding(ids.to_local(), options)?;
        let width = self.dims().last().copied().unwrap_or_default();
        let mut spec = Spec::new(mesh, given.placements(), [given.dims(), &[width]].concat(), rows.dtype())?;
        for axis in 0..mesh.ndim() {
            spec = spec.with_sizes(axis, given.sizes(axis).cloned())?;
        }
        let found = DTensor::leaf(rows, spec.shared());
        // The table adds up the gradients of all its ranks, so each rank gives a share.
        let is_shared =
            |&axis: &usize| ids.placements()[axis] == Replicate && spans(self.group().ranks(), mesh, axis);
        (0..mesh.ndim()).filter(is_shared).try_fold(found, DTensor::varying_on)
    }
}
