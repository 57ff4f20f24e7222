//! Export to one ordinary file, for programs without meshes.
use super::agreement::{NamedSpec, check_alike, check_named};
use crate::agreement::agreed;
use crate::files::disk;
use crate::files::lock::Lock;
use crate::files::weights::{WeightFile, WeightWriter};
use crate::{DTensor, Error, Result};
use candle_core::DType;
use candle_dist::DeviceMesh;
use itertools::Itertools;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const OP: &str = "checkpoint::export";

/// Writes tensors of `mesh` to one ordinary safetensors file, each as a whole.
///
/// They are gathered one after the other, so each rank needs memory for the largest of them. Rank 0 writes; the file
/// gets its name when it is complete and was read again. While it is written, a file beside it, with `.lock` at the end of its name,
/// says who writes.
///
/// # Errors
/// Those of [`save`](super::save).
pub fn export<N: AsRef<str>>(
    path: impl AsRef<Path>,
    mesh: &DeviceMesh,
    tensors: &[(N, DTensor)],
) -> Result<()> {
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
/// World::threads(2).run(|ctx| -> Result<()> {
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
/// Those of [`export`], and on all ranks alike if the names are not as many as the first dim has indexes, or a name comes twice.
pub fn export_parts<N: AsRef<str>>(
    path: impl AsRef<Path>,
    mesh: &DeviceMesh,
    tensors: &[(N, DTensor)],
    parts: impl Fn(&str) -> Option<Vec<String>>,
) -> Result<()> {
    let named: Vec<NamedSpec<'_>> =
        tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor.spec())).collect();
    check_alike(OP, mesh, &named)?;
    let (group, path) = (mesh.group()?, path.as_ref());
    let tensors = tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor));
    let tensors: Vec<_> =
        tensors.sorted_by_key(|(name, tensor)| WeightWriter::order(tensor.dtype(), name)).collect();
    let announced = agreed(group, OP, announced(&tensors, parts))?;
    let described =
        announced.iter().map(|(name, dtype, dims)| (name, format!("{} {dims:?}", dtype.as_str())));
    check_named(OP, group, &described.collect_vec())?;
    let place = (group.rank() == 0).then(|| ExportTarget::new(path)).transpose();
    let place = agreed(group, OP, place)?;
    let announced = announced.iter().map(|(name, dtype, dims)| (name.as_str(), *dtype, *dims));
    let mut writer =
        place.as_ref().map(|place| WeightWriter::create(&place.partial, announced, || {})).transpose();
    for (_, tensor) in tensors {
        let detached = DTensor::from_local_with_spec(tensor.to_local().detach(), tensor.spec().clone())?;
        let whole = detached.full_tensor()?;
        // After a failure rank 0 continues to gather, because the other ranks wait for it.
        if let Ok(Some(file)) = &mut writer
            && let Err(error) =
                group.to_host(&whole).map_err(Error::from).and_then(|whole| file.write(&whole))
        {
            writer = Err(error);
        }
    }
    let put = writer.and_then(|writer| {
        place.as_ref().zip(writer).map_or(Ok(()), |(place, writer)| place.put(path, writer))
    });
    // When a rank returns, the place is free.
    place.into_iter().for_each(ExportTarget::clear);
    agreed(group, OP, put)
}

/// Names the tensors of the file in the order in which their bytes lie there.
fn announced<'a>(
    tensors: &[(&str, &'a DTensor)],
    parts: impl Fn(&str) -> Option<Vec<String>>,
) -> Result<Vec<(String, DType, &'a [usize])>> {
    let mut announced = Vec::new();
    for (name, tensor) in tensors {
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
    Ok(announced)
}

/// Where rank 0 writes.
struct ExportTarget {
    /// The file until it is complete.
    partial: PathBuf,
    lock: Lock,
}

impl ExportTarget {
    /// Takes the lock of the file, and removes what a killed export has left.
    fn new(path: &Path) -> Result<Self> {
        let name = path.file_name().and_then(|name| name.to_str());
        let name =
            name.ok_or_else(|| Error::file(path, "is not a valid name to save under; choose another"))?;
        if fs::symlink_metadata(path).is_ok_and(|about| !about.is_file()) {
            return Err(Error::file(
                path,
                "is not a regular file, so it is not replaced; choose another name",
            ));
        }
        let mut lock = Lock::take(&path.with_file_name(format!("{name}.lock")))?;
        for left in lock.left() {
            // Anybody may have written the file, so the name must be one that an export gives, which leads nowhere else.
            let nonce =
                left.strip_prefix(name).and_then(|rest| rest.strip_prefix('.')?.strip_suffix(".partial"));
            let is_partial = nonce.is_some_and(Lock::is_nonce);
            let file = path.with_file_name(left);
            if is_partial && disk::is_file(&file).unwrap_or(false) {
                disk::remove_file(&file).map_err(|error| failed(&file, &error))?;
            }
        }
        let partial = format!("{name}.{}.partial", lock.nonce());
        match lock.announce([partial.clone()]) {
            Ok(()) => Ok(Self { partial: path.with_file_name(partial), lock }),
            Err(error) => {
                lock.release();
                Err(error)
            }
        }
    }

    /// Gives the file its name, when all of it is on the disk.
    fn put(&self, path: &Path, writer: WeightWriter) -> Result<()> {
        let stamp = writer.finish()?;
        let file = WeightFile::open(&self.partial)?;
        if file.stamp().as_ref() != Some(&stamp) {
            return Err(Error::file(
                &self.partial,
                "is not the file that was written; does another program write there?",
            ));
        }
        file.verify()?;
        let put = disk::rename(&self.partial, path).and_then(|()| disk::sync_folder(disk::folder_of(path)));
        put.map_err(|error| failed(path, &error))
    }

    /// Removes what is left of an export that failed.
    fn clear(self) {
        // The error matters, not whether its leftovers can be removed.
        if disk::is_file(&self.partial).unwrap_or(true) && disk::remove_file(&self.partial).is_err() {
            return;
        }
        self.lock.release();
    }
}

fn failed(path: &Path, error: &io::Error) -> Error {
    Error::file(path, format!("cannot be written ({error})"))
}
