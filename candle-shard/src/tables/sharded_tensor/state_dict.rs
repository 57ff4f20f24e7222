//! Maps of sharded tensors in files, which load under any spec.
use super::ShardedTensor;
use super::metadata::BoundMetadata;
use crate::agreement::agreed_on;
use crate::files::checkpoint::agreement::check_named;
use crate::files::checkpoint::save::write;
use crate::files::checkpoint::saved::{BlockWriter, SaveEntry};
use crate::tables::sharding_spec::ShardingSpec;
use crate::{Error, Result, Weights};
use candle_core::Device;
use candle_dist::ProcessGroup;
use std::collections::BTreeMap;
use std::path::Path;

/// Saves named tensors of `group` to the folder `path`, replacing a checkpoint that is there.
///
/// Every rank writes its own shards. The folder is a [`checkpoint`](crate::checkpoint): [`load_state`] reads it under
/// any spec on any group, and [`checkpoint::load`](crate::checkpoint::load) on any mesh.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::sharded_tensor::{load_state, save_state};
/// use candle_shard::{ChunkShardingSpec, Result, ShardedTensor};
///
/// let folder = std::env::temp_dir().join(format!("state-doc-{}", std::process::id()));
/// World::threads(2).run(|ctx| -> Result<()> {
///     let (x, group) = (Tensor::arange(0f32, 6., &Device::Cpu)?.reshape((3, 2))?, ctx.group());
///     let rows = ShardedTensor::distribute(&x, ChunkShardingSpec::on_ranks(0, [0, 1])?, group)?;
///     save_state(&folder, group, &[("x".into(), rows)].into())?;
///     let columns = ChunkShardingSpec::on_ranks(1, [1, 0])?;
///     let loaded = load_state(&folder, group, &[("x", &columns)], &Device::Cpu)?;
///     assert_eq!(loaded["x"].local_tensor()?.dims(), [3, 1]);
///     Ok(())
/// })?;
/// std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// On every rank alike: if ranks pass different names, if a tensor lies on another group, if the folder contains
/// something other than a checkpoint, or if a file cannot be written. The previous content then stays.
pub fn save_state(
    path: impl AsRef<Path>,
    group: &ProcessGroup,
    tensors: &BTreeMap<String, ShardedTensor>,
) -> Result<()> {
    const OP: &str = "sharded_tensor::save_state";
    let described = tensors.iter().map(|(name, tensor)| {
        let (layout, ranks) = (&tensor.layout, tensor.group().ranks());
        (name, format!("{layout} on ranks {ranks:?}"))
    });
    check_named(OP, group, &described.collect::<Vec<_>>())?;
    if let Some((name, tensor)) = tensors.iter().find(|(_, tensor)| tensor.group().ranks() != group.ranks()) {
        let (at, ranks) = (tensor.group().ranks(), group.ranks());
        let reason =
            format!("{name:?} lies on ranks {at:?}, and those of {ranks:?} are saved; save it by itself");
        return Error::op(OP, reason);
    }
    // Each rank writes its own shards. Empty ones are not written.
    let saved = tensors.iter().map(|(name, tensor)| {
        let held = (0..group.size()).flat_map(|rank| {
            let shards = tensor.layout.shards_of(rank).enumerate().filter(|(_, shard)| !shard.is_empty());
            shards.map(move |(part, shard)| BlockWriter { rank, part, block: shard.block() })
        });
        SaveEntry { name, shape: tensor.dims(), dtype: tensor.dtype(), pieces: held.collect() }
    });
    let held: Vec<&ShardedTensor> = tensors.values().collect();
    write(OP, path.as_ref(), group, &saved.collect::<Vec<_>>(), |nth, part| &held[nth].shards[part].tensor)
}

/// Loads tensors of a checkpoint, or of other [`Weights`], cut according to the specs, in their stored dtypes.
///
/// Each rank reads only its own shards. Runs one collective.
///
/// # Errors
/// On every rank alike: if a tensor is not in the files, if a spec does not fit it or the group, or if a file is
/// missing, damaged or unreadable.
pub fn load_state<N: AsRef<str>, S: Clone + Into<ShardingSpec>>(
    path: impl AsRef<Path>,
    group: &ProcessGroup,
    wanted: &[(N, S)],
    device: &Device,
) -> Result<BTreeMap<String, ShardedTensor>> {
    const OP: &str = "sharded_tensor::load_state";
    let read = || -> Result<_> {
        let weights = Weights::open(path.as_ref())?;
        let read = |(name, spec): &(N, S)| {
            let (name, spec) = (name.as_ref(), spec.clone().into());
            let layout = BoundMetadata::new(spec, weights.shape(name)?, weights.dtype(name)?, group)?;
            layout.check_device(OP, device)?;
            let tensor = ShardedTensor::build(layout, device, |shard| {
                weights.read_block(name, &shard.block(), device)
            })?;
            Ok((name.to_string(), tensor))
        };
        let read = wanted.iter().map(read).collect::<Result<_>>()?;
        Ok((read, weights.identity()))
    };
    agreed_on(group, OP, read)
}
