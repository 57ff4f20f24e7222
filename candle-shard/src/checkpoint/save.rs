//! Every rank writes its blocks; rank 0 makes the checkpoint of it.
//!
//! The files of a checkpoint never change. A save writes new ones, with names that no earlier save has used, and puts a new
//! index in the place of the old one by a single rename when all that it names is on the disk. So at every moment the folder
//! holds an index whose files are complete. Files that the index does not name are removed by the save that goes through
//! next, if the one that wrote them could not.
use super::index::{INDEX, Index, Saved, file_of, generation_of};
use super::{Named, check_alike};
use crate::agreement::{agreed, told};
use crate::weights::WeightWriter;
use crate::{DTensor, Error, Result, disk};
use candle_core::Tensor;
use candle_dist::{DeviceMesh, ProcessGroup};
use itertools::Itertools;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

const OP: &str = "checkpoint::save";

/// The name of an index that is being written.
const NEXT_INDEX: &str = "checkpoint.json.partial";

/// Saves tensors of `mesh` to the folder `path`, in place of a checkpoint that may be there.
///
/// Parameters and the state of an optimizer go together:
/// `checkpoint::save(path, &mesh, &[parameters.named_tensors(), optimizer.state()?].concat())`. With a data-parallel
/// axis outside of `mesh` one of the replicas calls it.
///
/// Where the program or the machine stops in the middle, the folder holds the last checkpoint or the new one, complete.
///
/// # Errors
/// On every rank alike: if ranks name different tensors, if a tensor is partial or of another mesh, if the folder holds
/// something else than a checkpoint, or if a file cannot be written. What was there before then stays, unless the new
/// checkpoint was complete already.
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
    let prepared = agreed(group, op, if leads { Prepared::new(path) } else { Ok(Prepared::default()) })?;
    let saved = told(op, group, &prepared.generation).and_then(|generations| {
        let generation = generations[0];
        agreed(group, op, write_blocks(path, (group.rank(), generation), tensors, local))?;
        let committed = if leads { commit(path, &Index::of(tensors, generation)) } else { Ok(()) };
        agreed(group, op, committed)
    });
    if leads {
        // What counts is whether the checkpoint is there, not whether there is something beside it.
        let cleared = prepared.clear(path, saved.is_err());
        cleared.unwrap_or_else(|error| log::warn!("{op}: {error}; the next save tries to remove it again"));
    }
    saved
}

/// What rank 0 finds before anything is written.
#[derive(Default)]
struct Prepared {
    /// What tells the names of this save's files from those of earlier ones.
    generation: u64,
    /// Whether the folder was made for this save.
    is_new: bool,
}

impl Prepared {
    /// Makes the folder, unless the checkpoint would replace something else.
    fn new(path: &Path) -> Result<Self> {
        if path.file_name().is_none() {
            return Err(Error::file(path, "is no name to save under; choose another"));
        }
        let is_new = !path.exists();
        let names = if is_new { Vec::new() } else { names_in(path)? };
        let is_ours = |name: &String| generation_of(name).is_some() || name == NEXT_INDEX;
        if !names.iter().any(|name| name == INDEX) && !names.iter().all(is_ours) {
            return Err(Error::file(path, "holds something else than a checkpoint; name a new folder"));
        }
        let generation = names.iter().filter_map(|name| generation_of(name)).max().map_or(0, |last| last + 1);
        let prepared = Self { generation, is_new };
        let made = if is_new { make_folder(path) } else { Ok(()) };
        if made.is_err() {
            // The error matters, not whether its traces can be removed.
            prepared.clear(path, true).ok();
        }
        made.map(|()| prepared)
    }

    /// Removes what the index of the folder does not name, and a folder that was made for nothing.
    ///
    /// A save that failed removes its own files only: it may have put its index in place without having it on the disk, where
    /// the last one's may come back.
    fn clear(&self, path: &Path, has_failed: bool) -> Result<()> {
        if !path.exists() {
            return Ok(());
        }
        let at = path.join(INDEX);
        let wanted: BTreeSet<String> = match fs::read(&at) {
            Ok(text) => {
                let index: Index = serde_json::from_slice(&text)
                    .map_err(|error| Error::file(&at, format!("cannot be read as an index ({error})")))?;
                let pieces = index.tensors.into_values().flat_map(|tensor| tensor.pieces);
                pieces.map(|piece| piece.file).collect()
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => BTreeSet::new(),
            Err(error) => return Err(failed(&at, &error)),
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

/// Writes the blocks that are this rank's to write, one of each tensor to a file.
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

/// Puts the index in its place, from where on the new checkpoint counts.
fn commit(path: &Path, index: &Index) -> Result<()> {
    let (next, at): (PathBuf, PathBuf) = (path.join(NEXT_INDEX), path.join(INDEX));
    let put = || -> io::Result<()> {
        let mut file = disk::create(&next)?;
        disk::write(&mut file, &next, &serde_json::to_vec_pretty(index)?)?;
        disk::sync(&file, &next)?;
        disk::rename(&next, &at)?;
        disk::sync_folder(path)
    };
    put().map_err(|error| failed(&at, &error))
}

fn failed(path: &Path, error: &io::Error) -> Error {
    Error::file(path, format!("cannot be written ({error})"))
}
