//! The folder of checkpoints, in which a crash at any time leaves those that are complete.
//!
//! Each is a folder of its own, `step-00000100`. While it is written its name has a number that no other training has, and `.partial` at
//! its end; it gets its name when all of it is on the disk, and is not touched again. One training at a time saves to the folder:
//! `training.lock` says which.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, ErrorKind, Write};
#[cfg(unix)]
use std::os::unix::fs::symlink;
#[cfg(windows)]
use std::os::windows::fs::symlink_dir as symlink;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use candle_shard::checkpoint::Lock;

use super::resume::STATE;
use crate::error::{InputError, InputResult, require};

const PARTIAL: &str = ".partial";
/// The name of a link to the checkpoint with the least loss of the text of `--valid`.
const BEST: &str = "best";
const LOCK: &str = "training.lock";

/// The folder of a step's checkpoint.
pub fn of_step(folder: &Path, step: usize) -> PathBuf {
    folder.join(name_of(step))
}

fn name_of(step: usize) -> String {
    format!("step-{step:08}")
}

/// The steps that have a folder of this program's names, in order.
fn steps(folder: &Path) -> io::Result<Vec<usize>> {
    let mut steps = Vec::new();
    for entry in fs::read_dir(folder)? {
        let name = entry?.file_name();
        steps.extend(step_of(&name).filter(|_| folder.join(&name).is_dir()));
    }
    steps.sort_unstable();
    Ok(steps)
}

/// The step whose checkpoint has this name. Others may have names that are similar.
fn step_of(name: &OsStr) -> Option<usize> {
    let step = name.to_str()?.strip_prefix("step-")?.parse().ok()?;
    (name == name_of(step).as_str()).then_some(step)
}

/// The step to whose checkpoint the link of a training leads; what else has its name is another's.
fn best_of(folder: &Path) -> Option<usize> {
    step_of(fs::read_link(folder.join(BEST)).ok()?.as_os_str())
}

/// The folders of checkpoints in the folder, the last step first; what has no state is none.
///
/// # Errors
/// If the folder cannot be read; it is named.
pub fn checkpoints(folder: &Path) -> Result<Vec<PathBuf>> {
    let steps = steps(folder).with_context(|| format!("{}", folder.display()))?;
    Ok(steps.into_iter().rev().map(|step| of_step(folder, step)).collect())
}

/// Which checkpoints of a folder stay when a newer one is there.
#[derive(Clone, Debug, Default)]
pub struct Retention {
    /// So many of the last ones, instead of all.
    pub last: Option<usize>,
    /// Whether the one with the least loss of the text of `--valid` stays too, with a link `best` to it.
    pub best: bool,
    /// The one that the training goes on from stays in any case.
    pub resumed: Option<PathBuf>,
}

/// A damaged checkpoint in the way of the next save, and the path that it gets.
#[derive(Clone, Debug)]
pub struct Damage {
    /// The folder of the checkpoint.
    pub from: PathBuf,
    /// The path that it gets.
    pub to: PathBuf,
}

impl Damage {
    /// The checkpoint in the folder `at`, if that is one of `folder` and a training has made it.
    pub fn within(folder: &Path, at: &Path) -> Option<Self> {
        let is_within = fs::canonicalize(at.parent()?).ok()? == fs::canonicalize(folder).ok()?;
        let from = folder.join(at.file_name()?);
        let path =
            |n: usize| from.with_extension(if n == 1 { "damaged".into() } else { format!("damaged-{n}") });
        let to = (1..).map(path).find(|path| fs::symlink_metadata(path).is_err())?;
        (is_within && from.join(STATE).is_file()).then_some(Self { from, to })
    }
}

/// Refuses a folder in which something of another has the name of the link to the best checkpoint.
///
/// # Errors
/// A sentence with the remedy.
pub fn check_best(folder: &Path) -> InputResult {
    let is_there = fs::symlink_metadata(folder.join(BEST)).is_ok();
    require!(
        !is_there || best_of(folder).is_some(),
        "--save {} has something named {BEST}, which --keep-best gives to a link: move it away, or give another folder.",
        folder.display()
    );
    Ok(())
}

/// Checks that checkpoints of steps after `start` can be saved to the folder, which is made if it is not there. Those that are damaged are
/// in nobody's way.
///
/// # Errors
/// A sentence if the folder cannot be made, or holds checkpoints that would have to go.
pub fn check(folder: &Path, start: usize, damaged: &[Damage]) -> InputResult {
    let shown = folder.display();
    let steps = fs::create_dir_all(folder).and_then(|()| steps(folder));
    let steps = steps.map_err(|error| {
        InputError(format!("--save {shown} cannot be written ({error}): give a folder that can be made."))
    })?;
    // An empty folder is in nobody's way.
    let is_empty =
        |step: &usize| fs::read_dir(of_step(folder, *step)).is_ok_and(|mut entries| entries.next().is_none());
    let is_whole = |step: usize| of_step(folder, step).join(STATE).is_file();
    let is_damaged = |step: &usize| damaged.iter().any(|one| one.from == of_step(folder, *step));
    let is_in_the_way = |step: &usize| *step > start && !is_empty(step) && !is_damaged(step);
    if let Some(last) = steps.into_iter().rev().find(is_in_the_way) {
        require!(
            !is_whole(last),
            "--save {shown} holds the checkpoint of step {last} already: --resume from it, move it away, or give another folder."
        );
        require!(
            false,
            "--save {shown} holds {}, which is no checkpoint: move it away, or give another folder.",
            name_of(last)
        );
    }
    Ok(())
}

/// The folder that a training saves to, which no other training does meanwhile.
#[derive(Debug)]
pub struct SaveFolder {
    folder: PathBuf,
    /// Until the training is over.
    lock: Option<Lock>,
}

/// The former name of [`SaveFolder`].
#[deprecated(since = "0.1.0", note = "renamed to SaveFolder")]
pub type Saves = SaveFolder;

impl SaveFolder {
    /// Takes the folder for steps after `start`, removes what killed trainings have left, and renames what is damaged.
    ///
    /// # Errors
    /// If another training has it; the error says which. Those of [`check`] and of the file system.
    pub fn hold(folder: &Path, start: usize, damaged: &[Damage]) -> Result<Self> {
        let lock = Lock::take(&folder.join(LOCK)).context("--save")?;
        let saves = Self { folder: folder.to_owned(), lock: Some(lock) };
        // Another training may have ended meanwhile.
        check(folder, start, damaged)?;
        for Damage { from, to } in damaged {
            fs::rename(from, to).with_context(|| format!("{}", from.display()))?;
        }
        saves.left().try_for_each(fs::remove_dir_all).with_context(|| format!("{}", folder.display()))?;
        Ok(saves)
    }

    /// The folders and links that are not complete, of this training and of killed ones. The lock has their names; what is similar is
    /// another's.
    fn left(&self) -> impl Iterator<Item = PathBuf> + '_ {
        let names = self.lock.iter().flat_map(Lock::names);
        let is_ours = |name: &str| name.starts_with("step-") || name.starts_with(BEST);
        let partial =
            names.filter(move |name| is_ours(name) && name.ends_with(PARTIAL) && !name.contains('/'));
        let path = partial.map(|name| self.folder.join(name));
        path.filter(|path| fs::symlink_metadata(path).is_ok_and(|about| about.is_dir() || about.is_symlink()))
    }

    /// Announces the name that something has while it comes into being, or goes.
    fn partial(&mut self, name: &str) -> Result<PathBuf> {
        let lock = self.lock.as_mut().context("the training is over")?;
        let name = format!("{name}.{}{PARTIAL}", lock.nonce());
        lock.announce([name.clone()])?;
        Ok(self.folder.join(name))
    }

    /// Makes an empty folder for the checkpoint of a step.
    ///
    /// # Errors
    /// Those of the file system.
    pub fn begin(&mut self, step: usize) -> Result<PathBuf> {
        let partial = self.partial(&name_of(step))?;
        fs::create_dir(&partial).with_context(|| format!("{}", partial.display()))?;
        Ok(partial)
    }

    /// Gives the checkpoint its name, when all of it is on the disk.
    ///
    /// # Errors
    /// Those of the file system; if something has the name.
    pub fn commit(&self, step: usize, partial: &Path) -> io::Result<()> {
        for entry in fs::read_dir(partial)? {
            let entry = entry?;
            if entry.file_type()?.is_dir() {
                settle(&entry.path())?;
            }
        }
        settle(partial)?;
        fs::rename(partial, of_step(&self.folder, step))?;
        settle(&self.folder)
    }

    /// Names the best checkpoint, that of the step `best`, and removes those that need not stay. All that stay are on the disk.
    ///
    /// A checkpoint that cannot be removed, such as one that another program reads, is a warning, and goes later.
    ///
    /// # Errors
    /// Those of the lock, and if the best one cannot be named.
    pub fn retain(&mut self, retention: &Retention, best: Option<usize>) -> Result<()> {
        self.name_best(retention, best)?;
        let Some(last) = retention.last else { return Ok(()) };
        let is_whole = |step: &usize| {
            let folder = of_step(&self.folder, *step);
            // A link leads to somebody else's.
            folder.join(STATE).is_file() && fs::symlink_metadata(&folder).is_ok_and(|about| about.is_dir())
        };
        let whole: Vec<usize> = steps(&self.folder)?.into_iter().filter(is_whole).collect();
        let staying = [retention.resumed.clone(), Some(self.folder.join(BEST))];
        let staying: Vec<PathBuf> =
            staying.into_iter().flatten().filter_map(|at| fs::canonicalize(at).ok()).collect();
        for &step in &whole[..whole.len().saturating_sub(last)] {
            let at = of_step(&self.folder, step);
            if fs::canonicalize(&at).map_or(true, |at| staying.contains(&at)) {
                continue;
            }
            // A folder that is half removed must not look like a checkpoint.
            let partial = self.partial(&name_of(step))?;
            if let Err(error) = fs::rename(&at, &partial) {
                candle_dist::warn(format_args!("{} cannot be removed: {error}", at.display()));
            }
        }
        settle(&self.folder)?;
        for left in self.left() {
            if let Err(error) = fs::remove_dir_all(&left) {
                candle_dist::warn(format_args!("{} cannot be removed: {error}", left.display()));
            }
        }
        Ok(())
    }

    /// Checks that the folder can have a link, which some file systems refuse.
    ///
    /// # Errors
    /// Those of the lock and of the file system.
    pub fn check_link(&mut self) -> Result<()> {
        let partial = self.partial(BEST)?;
        let made = symlink(BEST, &partial).and_then(|()| fs::remove_file(&partial));
        made.with_context(|| format!("{}: --keep-best needs a symbolic link", partial.display()))
    }

    /// Makes the link to the best checkpoint, that of the step `best`, if it is to stay and is here; otherwise removes a link to nothing.
    ///
    /// # Errors
    /// Those of the lock and of the file system; if something else has the name.
    pub fn name_best(&mut self, retention: &Retention, best: Option<usize>) -> Result<()> {
        let link = self.folder.join(BEST);
        let named = best_of(&self.folder);
        if named.is_some() && !link.exists() {
            fs::remove_file(&link).with_context(|| format!("{}", link.display()))?;
        }
        let step = best.filter(|step| retention.best && of_step(&self.folder, *step).join(STATE).is_file());
        let Some(step) = step.filter(|step| named != Some(*step)) else { return Ok(()) };
        let partial = self.partial(BEST)?;
        let name = || -> io::Result<()> {
            symlink(name_of(step), &partial)?;
            // In place of the link before, at once.
            fs::rename(&partial, &link)?;
            settle(&self.folder)
        };
        name().with_context(|| format!("{}", link.display()))
    }
}

impl Drop for SaveFolder {
    /// Frees the folder, with nothing left of saves that failed.
    fn drop(&mut self) {
        let is_clean = self.left().all(|left| fs::remove_dir_all(left).is_ok());
        if let Some(lock) = self.lock.take().filter(|_| is_clean) {
            lock.release();
        }
    }
}

/// Waits until the names in a folder are on the disk, where the system has a way to.
fn settle(folder: &Path) -> io::Result<()> {
    match File::open(folder).and_then(|folder| folder.sync_all()) {
        Err(error) if matches!(error.kind(), ErrorKind::Unsupported | ErrorKind::PermissionDenied) => Ok(()),
        done => done,
    }
}

/// Writes a small new file and waits until it is on the disk.
///
/// # Errors
/// Those of the file system.
pub fn write(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut file = File::create_new(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}
