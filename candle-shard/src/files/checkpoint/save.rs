//! Every rank writes its blocks; rank 0 turns them into the checkpoint.
//!
//! The files of a checkpoint never change. A save writes new ones, whose names have a random number that all ranks of the
//! save share. When all of them are on the disk, and were read again, a single rename replaces the old index by the new
//! one. So at any time the index in the folder names complete files of one save.
//!
//! A lock keeps two saves apart. It has the names of all files that its holder creates or replaces. What is removed is named there, or
//! in an index of ours, and nothing else is: a save that was killed leaves the lock file, and the next save removes what it names.
use super::agreement::{NamedSpec, check_alike};
use super::saved::{SaveEntry, file_of, index_of, is_name, partial};
use crate::agreement::{agreed, told};
use crate::files::digests::FileStamp;
use crate::files::disk;
use crate::files::index::{CheckpointIndex, INDEX};
use crate::files::lock::{self, Lock};
use crate::files::weights::{WeightFile, WeightWriter};
use crate::{DTensor, Error, Result};
use candle_core::Tensor;
use candle_dist::{DeviceMesh, ProcessGroup};
use itertools::Itertools;
use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

const OP: &str = "checkpoint::save";

/// The name of the lock in a checkpoint's folder.
const LOCK: &str = "checkpoint.lock";

/// Files by name, each with what tells it from others.
type Stamps = BTreeMap<String, FileStamp>;

/// Saves tensors of `mesh` to the folder `path`, replacing a checkpoint that is there.
///
/// Save parameters and optimizer state together:
/// `checkpoint::save(path, &mesh, &[parameters.named_tensors(), optimizer.state()?].concat())`. With a data-parallel
/// axis outside of `mesh`, only one of the replicas calls it. Ranks that hold parts of one model on several meshes, such as
/// the stages of a pipeline, call [`save_stages`](super::save_stages) together.
///
/// If the program or the machine stops during a save, the folder contains either the last checkpoint or the new one,
/// complete. Only one program at a time saves to a folder; `checkpoint.lock` says which. Other files in the folder stay. What was
/// written is read again before the last checkpoint goes.
///
/// # Errors
/// On every rank alike: if ranks pass different names, or a name twice or one that is reserved; if a tensor is partial or of another
/// mesh; if the folder contains something other than a checkpoint, or a checkpoint of a newer version, or one with tensors that this one
/// lacks while it lacks tensors of this one, as that of another stage; if another program saves
/// there; if the ranks do not see one folder, or a file cannot be written. The previous content then stays, unless
/// the new checkpoint was already complete.
pub fn save<N: AsRef<str>>(
    path: impl AsRef<Path>,
    mesh: &DeviceMesh,
    tensors: &[(N, DTensor)],
) -> Result<()> {
    let named: Vec<NamedSpec<'_>> =
        tensors.iter().map(|(name, tensor)| (name.as_ref(), tensor.spec())).collect();
    check_alike(OP, mesh, &named)?;
    let saved = named.iter().enumerate().map(|(nth, (name, spec))| SaveEntry::of_spec(nth, name, spec));
    write(OP, path.as_ref(), mesh.group()?, &saved.collect_vec(), |nth, _| tensors[nth].1.to_local())
}

/// Writes a checkpoint of tensors that have equal names on all ranks of `group`; `local` returns this rank's `part`-th
/// block of the `nth` tensor.
pub(crate) fn write<'a>(
    op: &'static str,
    path: &Path,
    group: &ProcessGroup,
    tensors: &[SaveEntry<'_>],
    local: impl Fn(usize, usize) -> &'a Tensor,
) -> Result<()> {
    let prepared = (group.rank() == 0).then(|| SaveState::new(path, tensors)).transpose();
    let prepared = agreed(group, op, prepared)?;
    let written = shared(op, path, group, prepared.as_ref()).and_then(|(nonce, patience)| {
        let stamps = written(op, path, group, tensors, (&nonce, patience), local)?;
        Ok((stamps, nonce))
    });
    // When a rank returns, the place is free, so the lock goes before the ranks agree.
    let committed = prepared.map_or(Ok(()), |prepared| {
        let committed = written.as_ref().map_err(Error::clone).and_then(|(stamps, nonce)| {
            commit(path, nonce, &CheckpointIndex::new(index_of(tensors, nonce), stamps.clone()))
        });
        // The result depends on whether the checkpoint is complete, not on leftover files.
        let cleared = prepared.clear(path, committed.as_ref().err());
        cleared.unwrap_or_else(|error| log::warn!("{op}: {error}; the next save tries to remove it again"));
        committed
    });
    written?;
    agreed(group, op, committed)
}

/// Tells all ranks the number of this save, and how long to wait for files of other ranks, if they see the folder of rank 0.
fn shared(
    op: &'static str,
    path: &Path,
    group: &ProcessGroup,
    prepared: Option<&SaveState>,
) -> Result<(String, Duration)> {
    let nonce = prepared.map(|prepared| prepared.lock.nonce().to_owned()).unwrap_or_default();
    let mut all: Vec<(String, String)> = told(op, group, &(nonce, candle_dist::init::host_name()))?;
    let patience = lock::patience(all.iter().map(|(_, host)| host.as_str()));
    let (nonce, _) = all.swap_remove(0);
    agreed(group, op, Lock::see(&path.join(LOCK), &nonce, patience))?;
    Ok((nonce, patience))
}

/// Writes the blocks of all ranks, and reads them again; returns all files. If a rank reports an error, nothing is left.
fn written<'a>(
    op: &'static str,
    path: &Path,
    group: &ProcessGroup,
    tensors: &[SaveEntry<'_>],
    (nonce, patience): (&str, Duration),
    local: impl Fn(usize, usize) -> &'a Tensor,
) -> Result<Stamps> {
    let mut created = Vec::new();
    let stamps = agreed(group, op, write_blocks(path, (group.rank(), nonce), tensors, local, &mut created));
    let stamps = stamps.and_then(|stamps| told(op, group, &stamps)).and_then(|stamps| {
        // Each rank reads what its neighbor wrote, so a file is read once, and by another process.
        let neighbor = &stamps[(group.rank() + 1) % group.size()];
        let read = verify(path, neighbor, patience, WeightFile::verify);
        let all: Stamps = stamps.iter().flat_map(|stamps| stamps.clone()).collect();
        // The index has its place where rank 0 sees the folder.
        let seen = if group.rank() == 0 { verify(path, &all, patience, |_| Ok(())) } else { Ok(()) };
        agreed(group, op, read.and(seen))?;
        Ok(all)
    });
    // After a failure of the group rank 0 may have gone on to commit these files. The lock names them, so if it has not, the next save
    // removes them.
    if stamps.as_ref().is_err_and(|error| !matches!(error, Error::Dist(_))) {
        // The error matters, not whether its leftovers can be removed.
        created.iter().for_each(|file| drop(disk::remove_file(file)));
    }
    stamps
}

/// Checks that the files are there, each with its length and digest, and that what `read` does with it succeeds.
fn verify(
    path: &Path,
    files: &Stamps,
    patience: Duration,
    read: impl Fn(&WeightFile) -> Result<()>,
) -> Result<()> {
    for (name, stamp) in files {
        let at = path.join(name);
        // If it stays away, the error of opening it says so.
        lock::seen(path, patience, || at.exists());
        let file = WeightFile::open(&at)?;
        if file.stamp().as_ref() != Some(stamp) {
            return Err(Error::file(
                path.join(name),
                "is not the file that was written; does another program write there?",
            ));
        }
        read(&file)?;
    }
    Ok(())
}

/// State that rank 0 reads before anything is written.
struct SaveState {
    /// Whether the folder was created for this save.
    is_new: bool,
    /// The names that this save creates.
    mine: BTreeSet<String>,
    lock: Lock,
}

impl SaveState {
    /// Creates the folder and takes its lock, unless the checkpoint would replace something else.
    fn new(path: &Path, tensors: &[SaveEntry<'_>]) -> Result<Self> {
        if path.file_name().is_none() {
            return Err(Error::file(path, "is not a valid name to save under; choose another"));
        }
        let is_new = fs::symlink_metadata(path).is_err();
        if is_new {
            let made = make_folder(path);
            if made.is_err() {
                disk::remove_folder(path).ok();
            }
            made?;
        }
        let locked = Lock::take(&path.join(LOCK)).and_then(|lock| Self::locked(path, tensors, is_new, lock));
        if is_new && locked.is_err() {
            disk::remove_folder(path).ok();
        }
        locked
    }

    /// Checks what is in the folder, and announces what is to change.
    fn locked(path: &Path, tensors: &[SaveEntry<'_>], is_new: bool, mut lock: Lock) -> Result<Self> {
        let was_left = !lock.left().is_empty();
        let announced = Self::replaced(path, tensors, &lock).and_then(|replaced| {
            let written = tensors.iter().flat_map(|saved| &saved.pieces);
            let mine = written.map(|written| file_of(written.rank, written.part, lock.nonce()));
            let mine: BTreeSet<String> = mine.chain([partial(lock.nonce())]).collect();
            lock.announce(mine.iter().cloned().chain(replaced)).map(|()| mine)
        });
        match announced {
            Ok(mine) => Ok(Self { is_new, mine, lock }),
            Err(error) => {
                // Nothing has changed, but what a killed save has left is still to be removed.
                if !was_left {
                    lock.release();
                }
                Err(error)
            }
        }
    }

    /// Returns the files of the checkpoint that is there, which must be one of the same model, or of a part or an extension of it.
    fn replaced(path: &Path, tensors: &[SaveEntry<'_>], lock: &Lock) -> Result<Vec<String>> {
        if let Some(index) = CheckpointIndex::to_replace(path)? {
            let (given, held): (BTreeSet<&str>, BTreeSet<&str>) =
                (tensors.iter().map(|saved| saved.name).collect(), index.names().collect());
            if let (Some(new), Some(lost)) = (given.difference(&held).next(), held.difference(&given).next())
            {
                return Err(Error::file(
                    path,
                    format!(
                        "has a checkpoint of other tensors, such as {lost:?}, which one with {new:?} would replace; save the stages \
                         of a pipeline together with checkpoint::save_stages, or save to another folder"
                    ),
                ));
            }
            return Ok(index.file_names().filter(|name| is_name(name)).map(str::to_owned).collect());
        }
        let names = names_in(path)?;
        match names.iter().find(|name| *name != LOCK && !lock.knows(name)) {
            Some(name) => {
                let reason = format!("contains something other than a checkpoint, such as {name:?}");
                Err(Error::file(path, format!("{reason}; name a new folder")))
            }
            None => Ok(Vec::new()),
        }
    }

    /// Removes files of this program that the folder's index does not name, and a folder that was created in vain.
    ///
    /// A failed save removes only its own files: it may have renamed its index without a sync to the disk, and after a
    /// crash the index of the last save may be back.
    fn clear(self, path: &Path, error: Option<&Error>) -> Result<()> {
        let Self { is_new, mine, lock } = self;
        let index = CheckpointIndex::to_replace(path)?;
        let wanted: BTreeSet<&str> = index.iter().flat_map(CheckpointIndex::file_names).collect();
        let known = lock.names().filter(|name| is_name(name) && !wanted.contains(&***name));
        let mut is_clean = true;
        for name in known {
            let file = path.join(name);
            // Others may have put something in its place.
            if !disk::is_file(&file).map_err(|error| failed(&file, &error))? {
                continue;
            }
            if error.is_some() && !mine.contains(name) {
                is_clean = false;
                continue;
            }
            disk::remove_file(&file).map_err(|error| failed(&file, &error))?;
        }
        // After a failure of the group other ranks may still write.
        if is_clean && !matches!(error, Some(Error::Dist(_))) {
            lock.release();
        }
        if error.is_some() && is_new && index.is_none() {
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

/// Writes the blocks that are assigned to this rank, at most one of each tensor per file.
fn write_blocks<'a>(
    folder: &Path,
    (rank, nonce): (usize, &str),
    tensors: &[SaveEntry<'_>],
    local: impl Fn(usize, usize) -> &'a Tensor,
    created: &mut Vec<PathBuf>,
) -> Result<Stamps> {
    let mut parts: BTreeMap<usize, Vec<(&str, &Tensor)>> = BTreeMap::new();
    for (nth, saved) in tensors.iter().enumerate() {
        for piece in saved.pieces.iter().filter(|piece| piece.rank == rank) {
            parts.entry(piece.part).or_default().push((saved.name, local(nth, piece.part)));
        }
    }
    let mut stamps = Stamps::new();
    for (part, mut mine) in parts {
        mine.sort_by_key(|(name, local)| WeightWriter::order(local.dtype(), name));
        let announced = mine.iter().map(|(name, local)| (*name, local.dtype(), local.dims()));
        let name = file_of(rank, part, nonce);
        let file = folder.join(&name);
        // A file of this name that is there already is somebody else's.
        let mut writer = WeightWriter::create(&file, announced, || created.push(file.clone()))?;
        mine.iter().try_for_each(|(_, local)| writer.write(local))?;
        stamps.insert(name, writer.finish()?);
    }
    if !stamps.is_empty() {
        disk::sync_folder(folder).map_err(|error| failed(folder, &error))?;
    }
    Ok(stamps)
}

/// Renames the index to its final name; from then on the new checkpoint is valid.
fn commit(path: &Path, nonce: &str, index: &CheckpointIndex) -> Result<()> {
    let (next, at): (PathBuf, PathBuf) = (path.join(partial(nonce)), path.join(INDEX));
    let put = || -> io::Result<()> {
        let mut file = disk::create(&next)?;
        disk::write(&mut file, &next, &index.text()?)?;
        disk::sync(&file, &next)?;
        disk::rename(&next, &at)?;
        disk::sync_folder(path)
    };
    put().map_err(|error| failed(&at, &error))
}

fn failed(path: &Path, error: &io::Error) -> Error {
    Error::file(path, format!("cannot be written ({error})"))
}
