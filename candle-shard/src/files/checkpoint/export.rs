//! Export to one ordinary file, for programs without meshes.
use super::agreement::{Named, check_alike};
use super::beside;
use crate::agreement::agreed;
use crate::files::disk;
use crate::files::weights::WeightWriter;
use crate::{DTensor, Error, Result};
use candle_core::DType;
use candle_dist::DeviceMesh;
use itertools::Itertools;
use std::path::Path;

const OP: &str = "checkpoint::export";

/// Writes tensors of `mesh` to one ordinary safetensors file, each as a whole.
///
/// They are gathered one after the other, so each rank needs memory for the largest of them. Rank 0 writes; the file
/// gets its name when it is complete.
///
/// # Errors
/// Those of [`save`](super::save).
pub fn export<N: AsRef<str>>(path: impl AsRef<Path>, mesh: &DeviceMesh, tensors: &[(N, DTensor)]) -> Result<()> {
    export_parts(path, mesh, tensors, |_| None)
}

/// Like [`export`], but the tensors for which `parts` has names are written as several: one of each index of the first dim,
/// which goes away. So stacked experts become a tensor for each.
///
/// ```
/// use candle_core::{DType, Device};
/// use candle_dist::World;
/// use candle_shard::{DTensor, Result, Shard, Weights, checkpoint};
///
/// let path = std::env::temp_dir().join(format!("export-parts-doc-{}.safetensors", std::process::id()));
/// World::local(2).run(|ctx| -> Result<()> {
///     let mesh = ctx.mesh(&[("ep", 2)])?;
///     let experts = DTensor::ones((3, 4, 2), DType::F32, &Device::Cpu, &mesh, &[Shard(0)])?;
///     let names = |name: &str| (name == "experts").then(|| (0..3).map(|i| format!("expert.{i}")).collect());
///     checkpoint::export_parts(&path, &mesh, &[("experts", experts)], names)
/// })?;
/// assert_eq!(Weights::open(&path)?.shape("expert.2")?, [4, 2]);
/// std::fs::remove_file(path)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// Those of [`export`], and on all ranks alike if the names are not as many as the first dim has indexes.
pub fn export_parts<N: AsRef<str>>(
    path: impl AsRef<Path>,
    mesh: &DeviceMesh,
    tensors: &[(N, DTensor)],
    parts: impl Fn(&str) -> Option<Vec<String>>,
) -> Result<()> {
    let named: Vec<Named<'_>> = tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor.spec())).collect();
    check_alike(OP, mesh, &named)?;
    let (group, path) = (mesh.group()?, path.as_ref());
    let partial = agreed(group, OP, beside(path, "partial"))?;
    let tensors = tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor));
    let tensors: Vec<_> = tensors.sorted_by_key(|(name, tensor)| WeightWriter::order(tensor.dtype(), name)).collect();
    let mut announced: Vec<(String, DType, &[usize])> = Vec::new();
    for (name, tensor) in &tensors {
        match (parts(name), tensor.dims().split_first()) {
            // Elements lie in the order of the first dim, so only the header tells.
            (Some(parts), Some((count, rest))) if parts.len() == *count => {
                announced.extend(parts.into_iter().map(|part| (part, tensor.dtype(), rest)));
            }
            (Some(parts), _) => {
                let (dims, count) = (tensor.dims(), parts.len());
                return Error::op(
                    OP,
                    format!("{count} names for parts of {name:?} {dims:?}: give one for each of its rows"),
                );
            }
            (None, _) => announced.push(((*name).to_owned(), tensor.dtype(), tensor.dims())),
        }
    }
    let announced = announced.iter().map(|(name, dtype, dims)| (name.as_str(), *dtype, *dims));
    let mut writer = (group.rank() == 0).then(|| WeightWriter::create(&partial, announced)).transpose();
    for (_, tensor) in tensors {
        let detached = DTensor::from_local_with_spec(tensor.to_local().detach(), tensor.spec().clone())?;
        let whole = detached.full_tensor()?;
        // After a failure rank 0 continues to gather, because the other ranks wait for it.
        if let Ok(Some(file)) = &mut writer
            && let Err(error) = group.to_host(&whole).map_err(Error::from).and_then(|whole| file.write(&whole))
        {
            writer = Err(error);
        }
    }
    let finish = |writer: Option<WeightWriter>| match writer {
        Some(writer) => {
            writer.finish()?;
            let put = disk::rename(&partial, path).and_then(|()| disk::sync_folder(disk::folder_of(path)));
            put.map_err(|error| Error::file(path, format!("cannot be written ({error})")))
        }
        None => Ok(()),
    };
    agreed(group, OP, writer.and_then(finish)).inspect_err(|_| {
        // The error matters, not whether its leftovers can be removed.
        disk::remove_file(&partial).ok();
    })
}
