//! Every rank writes its blocks; rank 0 makes the checkpoint of it.
use super::index::{INDEX, Index, Saved, file_of};
use super::{Named, beside, check_alike};
use crate::agreement::agreed;
use crate::weights::WeightWriter;
use crate::{DTensor, Error, Result};
use candle_core::Tensor;
use candle_dist::{DeviceMesh, ProcessGroup};
use itertools::Itertools;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Write};
use std::path::Path;

const OP: &str = "checkpoint::save";

/// Saves tensors of `mesh` to the folder `path`, in place of a checkpoint that may be there.
///
/// Parameters and the state of an optimiser go together:
/// `checkpoint::save(path, &mesh, &[parameters.named_tensors(), optimiser.state()?].concat())`. With a data-parallel
/// axis outside of `mesh` one of the replicas calls it.
///
/// # Errors
/// On every rank alike: if ranks name different tensors, if a tensor is partial or of another mesh, if the folder holds
/// something else than a checkpoint, or if a file cannot be written. What was there before then stays.
pub fn save<N: AsRef<str>>(path: impl AsRef<Path>, mesh: &DeviceMesh, tensors: &[(N, DTensor)]) -> Result<()> {
    let named: Vec<Named<'_>> = tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor.spec())).collect();
    check_alike(OP, mesh, &named)?;
    let saved = named.iter().enumerate().map(|(nth, (name, spec))| Saved::of_spec(nth, name, spec));
    write(OP, path.as_ref(), mesh.group()?, &saved.collect_vec(), |nth, _| tensors[nth].1.to_local())
}

/// Writes a checkpoint of tensors that all ranks of `group` name alike; `local` is this rank's `part`-th block of the
/// `nth` tensor.
pub(crate) fn write<'a>(
    op: &'static str,
    path: &Path,
    group: &ProcessGroup,
    tensors: &[Saved<'_>],
    local: impl Fn(usize, usize) -> &'a Tensor,
) -> Result<()> {
    let leads = group.rank() == 0;
    let partial = agreed(group, op, beside(path, "partial"))?;
    agreed(group, op, if leads { prepare(path, &partial) } else { Ok(()) })?;
    let saved = agreed(group, op, write_blocks(&partial, group.rank(), tensors, local)).and_then(|()| {
        let committed = if leads { commit(path, &partial, &Index::of(tensors)) } else { Ok(()) };
        agreed(group, op, committed)
    });
    if saved.is_err() && leads {
        // The error matters, not whether its traces can be removed.
        fs::remove_dir_all(&partial).ok();
    }
    saved
}

/// Makes an empty folder for the files, unless the checkpoint would replace something else.
fn prepare(path: &Path, partial: &Path) -> Result<()> {
    let is_empty = || fs::read_dir(path).is_ok_and(|mut entries| entries.next().is_none());
    if path.exists() && !path.join(INDEX).exists() && !is_empty() {
        return Err(Error::file(path, "holds something else than a checkpoint; name a new folder"));
    }
    remove(partial)?;
    fs::create_dir_all(partial).map_err(|error| failed(partial, &error))
}

/// Writes the blocks that are this rank's to write, one of each tensor to a file.
fn write_blocks<'a>(
    folder: &Path,
    rank: usize,
    tensors: &[Saved<'_>],
    local: impl Fn(usize, usize) -> &'a Tensor,
) -> Result<()> {
    let mut parts: BTreeMap<usize, Vec<(&str, &Tensor)>> = BTreeMap::new();
    for (nth, saved) in tensors.iter().enumerate() {
        for piece in saved.pieces.iter().filter(|piece| piece.rank == rank) {
            parts.entry(piece.part).or_default().push((saved.name, local(nth, piece.part)));
        }
    }
    for (part, mut mine) in parts {
        mine.sort_by_key(|(name, local)| WeightWriter::order(local.dtype(), name));
        let announced = mine.iter().map(|(name, local)| (*name, local.dtype(), local.dims()));
        let mut writer = WeightWriter::create(&folder.join(file_of(rank, part)), announced)?;
        mine.iter().try_for_each(|(_, local)| writer.write(local))?;
        writer.finish()?;
    }
    Ok(())
}

/// Writes the index and gives the folder its name.
fn commit(path: &Path, partial: &Path, index: &Index) -> Result<()> {
    let at = partial.join(INDEX);
    let write = || -> io::Result<()> {
        let mut file = File::create(&at)?;
        file.write_all(&serde_json::to_vec_pretty(index)?)?;
        file.sync_all()
    };
    write().map_err(|error| failed(&at, &error))?;
    let old = beside(path, "old")?;
    remove(&old)?;
    if path.exists() {
        fs::rename(path, &old).map_err(|error| failed(path, &error))?;
    }
    fs::rename(partial, path).map_err(|error| {
        // Back to its name, if there was one.
        fs::rename(&old, path).ok();
        failed(path, &error)
    })?;
    remove(&old)
}

/// Removes a folder if it is there.
fn remove(folder: &Path) -> Result<()> {
    match fs::remove_dir_all(folder) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(failed(folder, &error)),
        _ => Ok(()),
    }
}

fn failed(path: &Path, error: &io::Error) -> Error {
    Error::file(path, format!("cannot be written ({error})"))
}
