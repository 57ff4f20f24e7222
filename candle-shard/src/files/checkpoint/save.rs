//! Every rank writes its blocks; rank 0 turns them into the checkpoint.
//!
//! The files of a checkpoint never change. A save writes new ones, with names that no earlier save has used. When all
//! of them are on the disk, a single rename replaces the old index by the new one. So at any time the index in the
//! folder names complete files. If a save cannot remove the files that the index does not name, the next successful
//! save removes them.
use super::agreement::{Named, check_alike};
use super::saved::{Saved, file_of, generation_of, index_of};
use crate::agreement::{agreed, told};
use crate::files::disk;
use crate::files::index::{self, Blocks, INDEX, Index};
use crate::files::weights::WeightWriter;
use crate::{DTensor, Error, Result};
use candle_core::Tensor;
use candle_dist::{DeviceMesh, ProcessGroup};
use itertools::Itertools;
use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};

const OP: &str = "checkpoint::save";

/// The name of an index that is being written.
const NEXT_INDEX: &str = "checkpoint.json.partial";

/// Saves tensors of `mesh` to the folder `path`, replacing a checkpoint that is there.
///
/// Save parameters and optimizer state together:
/// `checkpoint::save(path, &mesh, &[parameters.named_tensors(), optimizer.state()?].concat())`. With a data-parallel
/// axis outside of `mesh`, only one of the replicas calls it. Ranks that hold parts of one model on several meshes, such as
/// the stages of a pipeline, call [`save_stages`](super::save_stages) together.
///
/// If the program or the machine stops during a save, the folder contains either the last checkpoint or the new one,
/// complete.
///
/// # Errors
/// On every rank alike: if ranks pass different names, if a tensor is partial or of another mesh, if the folder
/// contains something other than a checkpoint, or if a file cannot be written. The previous content then stays, unless
/// the new checkpoint was already complete.
pub fn save<N: AsRef<str>>(path: impl AsRef<Path>, mesh: &DeviceMesh, tensors: &[(N, DTensor)]) -> Result<()> {
    let named: Vec<Named<'_>> = tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor.spec())).collect();
    check_alike(OP, mesh, &named)?;
    let saved = named.iter().enumerate().map(|(nth, (name, spec))| Saved::of_spec(nth, name, spec));
    write(OP, path.as_ref(), mesh.group()?, &saved.collect_vec(), |nth, _| tensors[nth].1.to_local())
}

/// Writes a checkpoint of tensors that have equal names on all ranks of `group`; `local` returns this rank's `part`-th
/// block of the `nth` tensor.
pub(crate) fn write<'a>(
    op: &'static str,
    path: &Path,
    group: &ProcessGroup,
    tensors: &[Saved<'_>],
    local: impl Fn(usize, usize) -> &'a Tensor,
) -> Result<()> {
    let leads = group.rank() == 0;
    let prepared = agreed(group, op, if leads { Prepared::new(path) } else { Ok(Prepared::default()) })?;
    let saved = told(op, group, &prepared.generation).and_then(|generations| {
        let generation = generations[0];
        agreed(group, op, write_blocks(path, (group.rank(), generation), tensors, local))?;
        let committed = if leads { commit(path, &index_of(tensors, generation)) } else { Ok(()) };
        agreed(group, op, committed)
    });
    if leads {
        // The result depends on whether the checkpoint is complete, not on leftover files.
        let cleared = prepared.clear(path, saved.is_err());
        cleared.unwrap_or_else(|error| log::warn!("{op}: {error}; the next save tries to remove it again"));
    }
    saved
}

/// State that rank 0 reads before anything is written.
#[derive(Default)]
struct Prepared {
    /// Distinguishes the names of this save's files from those of earlier saves.
    generation: u64,
    /// Whether the folder was created for this save.
    is_new: bool,
    /// The folder, locked until this save is over.
    _lock: Option<File>,
}

impl Prepared {
    /// Creates the folder, unless the checkpoint would replace something else.
    fn new(path: &Path) -> Result<Self> {
        if path.file_name().is_none() {
            return Err(Error::file(path, "is not a valid name to save under; choose another"));
        }
        let is_new = !path.exists();
        if is_new {
            let made = make_folder(path);
            if made.is_err() {
                // The error matters, not whether its leftovers can be removed.
                Self { generation: 0, is_new, _lock: None }.clear(path, true).ok();
            }
            made?;
        }
        let lock = locked(path)?;
        let names = names_in(path)?;
        let is_ours = |name: &String| generation_of(name).is_some() || name == NEXT_INDEX;
        if !names.iter().any(|name| name == INDEX) && !names.iter().all(is_ours) {
            return Err(Error::file(path, "contains something other than a checkpoint; name a new folder"));
        }
        let generation = names.iter().filter_map(|name| generation_of(name)).max().map_or(0, |last| last + 1);
        Ok(Self { generation, is_new, _lock: lock })
    }

    /// Removes files that the folder's index does not name, and a folder that was created in vain.
    ///
    /// A failed save removes only its own files: it may have renamed its index without a sync to the disk, and after a
    /// crash the index of the last save may be back.
    fn clear(&self, path: &Path, has_failed: bool) -> Result<()> {
        if !path.exists() {
            return Ok(());
        }
        let at = path.join(INDEX);
        let wanted: BTreeSet<String> = match fs::exists(&at).map_err(|error| failed(&at, &error))? {
            true => Index::read(&at)?.into_files().into_iter().collect(),
            false => BTreeSet::new(),
        };
        for name in names_in(path)? {
            let is_left = match generation_of(&name) {
                Some(generation) => (!has_failed || generation == self.generation) && !wanted.contains(&name),
                None => name == NEXT_INDEX,
            };
            if is_left {
                let file = path.join(name);
                disk::remove_file(&file).map_err(|error| failed(&file, &error))?;
            }
        }
        if has_failed && self.is_new && !at.exists() {
            disk::remove_folder(path).map_err(|error| failed(path, &error))?;
        }
        Ok(())
    }
}

/// Locks a folder, so that no two saves write to it at a time; `None` where folders cannot be locked.
fn locked(path: &Path) -> Result<Option<File>> {
    let Ok(folder) = File::open(path) else { return Ok(None) };
    match folder.try_lock() {
        Ok(()) => Ok(Some(folder)),
        Err(TryLockError::WouldBlock) => {
            let fix = "save to a folder of its own; ranks that hold parts of one model save together, by save_stages";
            Err(Error::file(path, format!("is being written by another save; {fix}")))
        }
        Err(TryLockError::Error(_)) => Ok(None),
    }
}

fn names_in(path: &Path) -> Result<Vec<String>> {
    let names = || -> io::Result<Vec<String>> {
        fs::read_dir(path)?.map(|entry| Ok(entry?.file_name().to_string_lossy().into_owned())).collect()
    };
    names().map_err(|error| failed(path, &error))
}

fn make_folder(path: &Path) -> Result<()> {
    let above = disk::folder_of(path);
    disk::create_folder(path).and_then(|()| disk::sync_folder(above)).map_err(|error| failed(path, &error))
}

/// Writes the blocks that are assigned to this rank, at most one of each tensor per file.
fn write_blocks<'a>(
    folder: &Path,
    (rank, generation): (usize, u64),
    tensors: &[Saved<'_>],
    local: impl Fn(usize, usize) -> &'a Tensor,
) -> Result<()> {
    let mut parts: BTreeMap<usize, Vec<(&str, &Tensor)>> = BTreeMap::new();
    for (nth, saved) in tensors.iter().enumerate() {
        for piece in saved.pieces.iter().filter(|piece| piece.rank == rank) {
            parts.entry(piece.part).or_default().push((saved.name, local(nth, piece.part)));
        }
    }
    let writes = !parts.is_empty();
    for (part, mut mine) in parts {
        mine.sort_by_key(|(name, local)| WeightWriter::order(local.dtype(), name));
        let announced = mine.iter().map(|(name, local)| (*name, local.dtype(), local.dims()));
        let mut writer = WeightWriter::create(&folder.join(file_of(rank, part, generation)), announced)?;
        mine.iter().try_for_each(|(_, local)| writer.write(local))?;
        writer.finish()?;
    }
    match writes {
        true => disk::sync_folder(folder).map_err(|error| failed(folder, &error)),
        false => Ok(()),
    }
}

/// Renames the index to its final name; from then on the new checkpoint is valid.
fn commit(path: &Path, tensors: &Blocks) -> Result<()> {
    let (next, at): (PathBuf, PathBuf) = (path.join(NEXT_INDEX), path.join(INDEX));
    let put = || -> io::Result<()> {
        let mut file = disk::create(&next)?;
        disk::write(&mut file, &next, &index::text_of(tensors)?)?;
        disk::sync(&file, &next)?;
        disk::rename(&next, &at)?;
        disk::sync_folder(path)
    };
    put().map_err(|error| failed(&at, &error))
}

fn failed(path: &Path, error: &io::Error) -> Error {
    Error::file(path, format!("cannot be written ({error})"))
}
