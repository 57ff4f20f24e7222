//! Saving distributed tensors, and loading them on any other mesh.
//!
//! [`save_state`](crate::sharded_tensor::save_state) and [`load_state`](crate::sharded_tensor::load_state) save and
//! load [`ShardedTensor`](crate::ShardedTensor)s in the same format, so files of one kind also load as the other.
//!
//! A checkpoint is a folder. It contains one safetensors file per writing rank, with the blocks of that rank (more
//! files if a rank holds several blocks of one tensor), and `checkpoint.json`, which says which file contains which
//! block. Blocks that several ranks hold are written once. A new checkpoint replaces the last one atomically when all
//! of it is on the disk: after a crash, one of the two is complete.
//!
//! Each MiB of a file has a digest, which is compared when something of it is read, so damage is an error that names file and tensor.
//! Checkpoints of versions without digests load too. While a program saves it holds a [`Lock`], so two programs cannot
//! save to one folder at a time. On NFS that takes mounts with locks; without them one of the programs may get an error, but no
//! checkpoint is a mixture of two.
//!
//! Every rank calls these functions, with a path on a file system that all ranks share. If one rank fails, all ranks
//! return the same error.
pub(crate) mod agreement;
#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod crashes;
mod export;
pub(crate) mod save;
pub(crate) mod saved;
mod stages;

pub use crate::files::lock::Lock;
pub use export::{export, export_parts};
pub use save::save;
pub use stages::save_stages;

use crate::agreement::agreed_on;
use crate::layout::{Placement, RowsOf, Spec};
use crate::{DTensor, Result, Weights};
use candle_core::{Device, Var};
use candle_dist::DeviceMesh;
use std::collections::BTreeMap;
use std::path::Path;

/// A tensor to read, with the larger tensor that contains it if there is none of its name.
type LoadRequest<'a> = (&'a str, Option<&'a RowsOf>, &'a Spec);

/// Loads tensors of a checkpoint, or of other [`Weights`], in the layouts of the placements and in their stored dtypes.
///
/// Each rank reads only its own shards. Runs one collective, or more if another program replaces the checkpoint meanwhile.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Result, Shard, checkpoint};
///
/// let folder = std::env::temp_dir().join(format!("checkpoint-doc-{}", std::process::id()));
/// let x = Tensor::arange(0u32, 10, &Device::Cpu)?.reshape((5, 2))?;
/// World::threads(3).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 3)])?;
///     checkpoint::save(&folder, &mesh, &[("x", DTensor::distribute(&x, &mesh, &[Shard(0)])?)])
/// })?;
/// let loaded = World::threads(2).run(|ctx| -> Result<Vec<Vec<u32>>> {
///     let mesh = ctx.mesh(&[("other", 2)])?;
///     let loaded = checkpoint::load(&folder, &mesh, &[("x", [Shard(1)])], &Device::Cpu)?;
///     Ok(loaded["x"].to_local().to_vec2()?)
/// })?;
/// assert_eq!(loaded[1], [[1], [3], [5], [7], [9]]);
/// std::fs::remove_dir_all(folder)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// On every rank alike: if a tensor is not in the files or does not have the dims that the placements shard, if a
/// file is missing, damaged or unreadable, or if ranks read different checkpoints.
pub fn load<N: AsRef<str>, P: AsRef<[Placement]>>(
    path: impl AsRef<Path>,
    mesh: &DeviceMesh,
    wanted: &[(N, P)],
    device: &Device,
) -> Result<BTreeMap<String, DTensor>> {
    read_with(path.as_ref(), mesh, |weights| {
        let read = |(name, placements): &(N, P)| {
            let (name, placements) = (name.as_ref(), placements.as_ref());
            let spec = Spec::new(mesh, placements, weights.shape(name)?, weights.dtype(name)?)?;
            Ok((name.to_string(), weights.read(name, &spec, device)?))
        };
        wanted.iter().map(read).collect()
    })
}

/// Reads the tensors of these names in these layouts; if any rank fails, every rank returns the first error.
pub(crate) fn read<'a>(
    path: &Path,
    mesh: &DeviceMesh,
    wanted: impl Iterator<Item = LoadRequest<'a>>,
    device: &Device,
) -> Result<Vec<DTensor>> {
    let wanted: Vec<LoadRequest<'a>> = wanted.collect();
    read_with(path, mesh, |weights| {
        wanted.iter().map(|&(name, within, spec)| weights.read_part(name, within, spec, device)).collect()
    })
}

/// Returns what `read` reads of one checkpoint, the same one on all ranks; if any rank fails, every rank returns the first error.
///
/// Every rank calls it. `read` does not communicate, and runs again if another program replaces the checkpoint meanwhile.
pub(crate) fn read_with<T>(
    path: &Path,
    mesh: &DeviceMesh,
    read: impl Fn(&Weights) -> Result<T>,
) -> Result<T> {
    agreed_on(mesh.group()?, "checkpoint::load", || {
        let weights = Weights::open(path)?;
        Ok((read(&weights)?, weights.identity()))
    })
}

/// Sets a variable to the value of this rank's shard.
pub(crate) fn set(var: &Var, value: &DTensor) -> Result<()> {
    if var.elem_count() > 0 {
        var.set(value.to_local())?;
    }
    Ok(())
}
