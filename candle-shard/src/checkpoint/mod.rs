//! Saving distributed tensors, and loading them on any other mesh.
//!
//! [`ShardedTensor`](crate::ShardedTensor)s are saved and loaded by
//! [`save_state`](crate::sharded_tensor::save_state) and [`load_state`](crate::sharded_tensor::load_state), in the same
//! format: what one saves the other loads.
//!
//! A checkpoint is a folder: one safetensors file for each rank that holds something, with the blocks that it holds (more
//! files for a rank that holds several blocks of one tensor), and `checkpoint.json`, which says which file holds which block.
//! What several ranks hold is written once. A new checkpoint takes the place of the last one at a single moment, when all of
//! it is on the disk: a crash leaves the one or the other.
//!
//! Every rank calls these functions, with a path to a file system that all ranks share; what goes wrong on one rank is
//! the same error on all of them.
pub(crate) mod agreement;
#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod crashes;
mod export;
pub(crate) mod index;
pub(crate) mod save;

pub use export::export;
pub use save::save;

use crate::agreement::agreed;
use crate::nn::part::Within;
use crate::placement::Placement;
use crate::spec::Spec;
use crate::{DTensor, Error, Result, Weights};
use agreement::check_alike;
use candle_core::{Device, Var};
use candle_dist::DeviceMesh;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// A tensor to be saved.
type Named<'a> = (&'a str, &'a Spec);

/// A tensor to be read, with what it is a part of where it is not there by its name.
type Wanted<'a> = (&'a str, Option<&'a Within>, &'a Spec);

/// Tensors of a checkpoint, or of other [`Weights`], laid out as the placements say, in the dtypes in which they are
/// stored.
///
/// A rank reads what it will hold and no more. One collective.
///
/// ```
/// use candle_core::{Device, Tensor};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Result, Shard, checkpoint};
///
/// let folder = std::env::temp_dir().join(format!("checkpoint-doc-{}", std::process::id()));
/// let x = Tensor::arange(0u32, 10, &Device::Cpu)?.reshape((5, 2))?;
/// World::local(3).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("tp", 3)])?;
///     checkpoint::save(&folder, &mesh, &[("x", DTensor::distribute(&x, &mesh, &[Shard(0)])?)])
/// })?;
/// let loaded = World::local(2).run(|ctx| -> Result<Vec<Vec<u32>>> {
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
/// On every rank alike: if a tensor is not there or does not have the dims that the placements shard, if a file is
/// missing, damaged or cannot be read.
pub fn load<N: AsRef<str>, P: AsRef<[Placement]>>(
    path: impl AsRef<Path>,
    mesh: &DeviceMesh,
    wanted: &[(N, P)],
    device: &Device,
) -> Result<BTreeMap<String, DTensor>> {
    let read = || -> Result<_> {
        let weights = Weights::open(path)?;
        let read = |(name, placements): &(N, P)| {
            let (name, placements) = (name.as_ref(), placements.as_ref());
            let spec = Spec::new(mesh, placements, weights.shape(name)?, weights.dtype(name)?)?;
            Ok((name.to_string(), weights.read(name, &spec, device)?))
        };
        wanted.iter().map(read).collect()
    };
    agreed(mesh.group()?, "checkpoint::load", read())
}

/// The tensors of these names in these layouts, or the first error of a rank, on every rank.
pub(crate) fn read<'a>(
    path: &Path,
    mesh: &DeviceMesh,
    wanted: impl Iterator<Item = Wanted<'a>>,
    device: &Device,
) -> Result<Vec<DTensor>> {
    let read = || {
        let weights = Weights::open(path)?;
        wanted.map(|(name, within, spec)| weights.read_part(name, within, spec, device)).collect()
    };
    agreed(mesh.group()?, "checkpoint::load", read())
}

/// Gives a variable the value of this rank's shard.
pub(crate) fn set(var: &Var, value: &DTensor) -> Result<()> {
    if var.elem_count() > 0 {
        var.set(value.to_local())?;
    }
    Ok(())
}

/// The path with something appended to its last part.
fn beside(path: &Path, what: &str) -> Result<PathBuf> {
    let name = path.file_name().ok_or_else(|| Error::file(path, "is no name to save under; choose another"))?;
    Ok(path.with_file_name(format!("{}.{what}", name.to_string_lossy())))
}
