//! The folder of checkpoints, in which a crash at any time leaves those that are complete.
//!
//! Each is a folder of its own, `step-00000100`. While it is written it is called `step-00000100.partial`; it gets its name
//! when all of it is on the disk, and is not touched again.

use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::cli::{Checked, UsageError, require};

const PARTIAL: &str = ".partial";

/// The folder of a step's checkpoint.
pub fn of_step(folder: &Path, step: usize) -> PathBuf {
    folder.join(format!("step-{step:08}"))
}

/// What that folder is called until it is complete.
pub fn partial(folder: &Path, step: usize) -> PathBuf {
    let mut path = of_step(folder, step).into_os_string();
    path.push(PARTIAL);
    path.into()
}

/// The steps whose checkpoints are complete, in order.
fn complete(folder: &Path) -> io::Result<Vec<usize>> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        steps.extend(name.to_str().and_then(|name| name.strip_prefix("step-")?.parse::<usize>().ok()));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// The last checkpoint in the folder.
///
/// # Errors
/// If there is none; the folder is named.
pub fn latest(folder: &Path) -> Result<PathBuf> {
    match complete(folder).with_context(|| format!("{}", folder.display()))?.last() {
        Some(&step) => Ok(of_step(folder, step)),
        None => bail!("{}: holds no checkpoint; give the folder of an earlier --save", folder.display()),
    }
}

/// Checks that checkpoints of steps after `start` can be saved to the folder, which is made if it is not there.
///
/// # Errors
/// A sentence if the folder cannot be made, or holds checkpoints that would have to go.
pub fn check(folder: &Path, start: usize) -> Checked {
    let shown = folder.display();
    let steps = fs::create_dir_all(folder).and_then(|()| complete(folder));
    let steps = steps.map_err(|error| {
        UsageError(format!("--save {shown} cannot be written ({error}): give a folder that can be made."))
    })?;
    let last = steps.last().copied().unwrap_or(0);
    require!(
        last <= start,
        "--save {shown} holds the checkpoint of step {last} already: --resume from it, or give another folder."
    );
    Ok(())
}

/// An empty folder for the checkpoint of a step; what killed saves have left is removed.
///
/// # Errors
/// Those of the file system.
pub fn begin(folder: &Path, step: usize) -> io::Result<PathBuf> {
    for entry in fs::read_dir(folder)? {
        let path = entry?.path();
        let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        if name.starts_with("step-") && name.ends_with(PARTIAL) {
            fs::remove_dir_all(&path)?;
        }
    }
    let partial = partial(folder, step);
    fs::create_dir(&partial)?;
    Ok(partial)
}

/// Gives the checkpoint its name, when all of it is on the disk.
///
/// # Errors
/// Those of the file system.
pub fn commit(folder: &Path, step: usize, partial: &Path) -> io::Result<()> {
    for entry in fs::read_dir(partial)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            settle(&entry.path())?;
        }
    }
    settle(partial)?;
    fs::rename(partial, of_step(folder, step))?;
    settle(folder)
}

/// Waits until the names in a folder are on the disk, where the system has a way to.
fn settle(folder: &Path) -> io::Result<()> {
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::PermissionDenied) => Ok(()),
        done => done,
    }
}

/// Writes a small file and waits until it is on the disk.
///
/// # Errors
/// Those of the file system.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
