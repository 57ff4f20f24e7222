//! A file that says who writes to a place, and what the writer may leave behind.
use crate::files::{disk, regular};
use crate::{Error, Result};
use candle_dist::init::host_name;
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fs::{self, File, Metadata, TryLockError};
use std::hash::{BuildHasher, RandomState};
use std::io::{self, ErrorKind, Read};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};
use std::{process, thread};

/// What a lock file begins with.
const TITLE: &str = "A lock of candle-shard: each line below is a process that writes here, or that wrote here until it was killed.\n";

/// The longest lock file that is read.
const LONGEST: u64 = 1 << 26;

/// How often a lock is tried again that another process takes away at this moment.
const TRIES: usize = 100;

/// After so many seconds what a process of another host has announced counts as left. Where hosts share a file system without locks, it
/// may live.
const ELSEWHERE: u64 = 24 * 60 * 60;

/// How long a rank waits to see a file of another rank on the same host, and on another one, whose file system may have a cache of folders.
const PATIENCE: [Duration; 2] = [Duration::from_secs(2), Duration::from_secs(30)];
/// How often it looks.
const TICK: Duration = Duration::from_millis(50);

/// A place that one process at a time writes to.
///
/// It is a file that is locked by the operating system while this value lives, so a process that was killed blocks nobody. The
/// file says who holds it. A holder [announces](Self::announce) the names of what it is about to create, so that the next holder
/// knows what a killed one has [left](Self::left).
///
/// Where a file system has no locks the file is written all the same, with a warning in the log. On NFS a lock holds for all hosts
/// only if they mount it with locks.
///
/// ```
/// use candle_shard::checkpoint::Lock;
///
/// let path = std::env::temp_dir().join(format!("lock-doc-{}.lock", std::process::id()));
/// let held = Lock::take(&path)?;
/// let refused = Lock::take(&path).unwrap_err().to_string();
/// assert!(refused.contains(&format!("held by process {}", std::process::id())), "{refused}");
/// held.release();
/// assert!(!path.exists());
/// # Ok::<(), candle_shard::Error>(())
/// ```
#[derive(Debug)]
#[must_use = "the place is free again when the lock is dropped"]
pub struct Lock {
    path: PathBuf,
    file: File,
    nonce: String,
    left: BTreeSet<String>,
    /// The names of holders that may live.
    unsure: BTreeSet<String>,
    mine: BTreeSet<String>,
}

/// A line of the file.
#[derive(Serialize, Deserialize)]
struct LockHolder {
    host: String,
    pid: u32,
    /// When it wrote the line, in seconds since 1970.
    at: u64,
    nonce: String,
    /// The names that it may create or remove.
    names: BTreeSet<String>,
}

impl Lock {
    /// Takes the lock that the file `path` stands for, and creates the file.
    ///
    /// # Errors
    /// If another process, or another thread of this one, holds it: the error says who, on which host, and for how long. If the file is
    /// none of ours, or cannot be written.
    pub fn take(path: &Path) -> Result<Self> {
        for _ in 0..TRIES {
            if let Some(lock) = Self::try_take(path)? {
                return Ok(lock);
            }
            thread::sleep(Duration::from_millis(1));
        }
        Err(Error::file(path, "is held by other processes, one after the other; try again"))
    }

    /// Returns `None` if the file was removed meanwhile.
    fn try_take(path: &Path) -> Result<Option<Self>> {
        let cannot = |error: io::Error| Error::file(path, format!("cannot be written ({error})"));
        let file = match disk::append(path) {
            Err(error) if error.kind() == ErrorKind::NotFound && disk::folder_of(path).is_dir() => {
                return Ok(None);
            }
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(foreign(path)),
            file => file.map_err(cannot)?,
        };
        let is_locked = match file.try_lock() {
            Ok(()) => true,
            Err(TryLockError::WouldBlock) => return held(path).map_or(Ok(None), Err),
            Err(TryLockError::Error(error)) => {
                log::warn!("{}: cannot be locked ({error}), so nobody else must write there", path.display());
                false
            }
        };
        // The holder before removes the file while it holds it.
        match fs::symlink_metadata(path) {
            Ok(there) if is_same(&file.metadata().map_err(cannot)?, &there) => {}
            Err(error) if error.kind() != ErrorKind::NotFound => return Err(cannot(error)),
            _ => return Ok(None),
        }
        let text = read(&file).map_err(cannot)?;
        if !is_ours(&text) {
            return Err(foreign(path));
        }
        let (host, now) = (host_name(), now().as_secs());
        let is_dead = |holder: &LockHolder| {
            is_locked && (holder.host == host || now.saturating_sub(holder.at) > ELSEWHERE)
        };
        let (dead, unsure): (Vec<LockHolder>, Vec<LockHolder>) = holders(&text).partition(is_dead);
        let [left, unsure] =
            [dead, unsure].map(|holders| holders.into_iter().flat_map(|holder| holder.names).collect());
        let (path, nonce, mine) = (path.into(), nonce(), BTreeSet::new());
        let mut lock = Self { path, file, nonce, left, unsure, mine };
        // A killed process may have left half of the title, or of a line.
        let start = match text.len() < TITLE.len() {
            true => &TITLE[text.len()..],
            false if text.ends_with('\n') => "",
            false => "\n",
        };
        match lock.put(start.as_bytes()).and_then(|()| lock.announce([])) {
            Ok(()) => Ok(Some(lock)),
            Err(error) => {
                if lock.left.is_empty() {
                    lock.release();
                }
                Err(error)
            }
        }
    }

    /// Returns a number that no other holder of any lock has, in 16 hexadecimal digits.
    pub fn nonce(&self) -> &str {
        &self.nonce
    }

    /// Returns whether a text has the form of a [nonce](Self::nonce).
    pub(crate) fn is_nonce(text: &str) -> bool {
        text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
    }

    /// Returns the names that holders before this one have announced, if they were killed before they [released](Self::release) the lock.
    /// Without those of holders that may live: of the last day on other hosts, and of all where the file system has no locks.
    pub fn left(&self) -> &BTreeSet<String> {
        &self.left
    }

    /// Returns whether any holder has announced this name.
    pub fn knows(&self, name: &str) -> bool {
        self.names().chain(&self.unsure).any(|known| known == name)
    }

    /// Returns the names that this holder has announced, and those that were [left](Self::left).
    pub fn names(&self) -> impl Iterator<Item = &String> {
        self.left.iter().chain(&self.mine)
    }

    /// Writes the names of what this holder is about to create or to remove, and waits until they are on the disk.
    ///
    /// # Errors
    /// If the file cannot be written.
    pub fn announce(&mut self, names: impl IntoIterator<Item = String>) -> Result<()> {
        let names: BTreeSet<String> = names.into_iter().collect();
        let (nonce, host, pid, at) = (self.nonce.clone(), host_name(), process::id(), now().as_secs());
        let line = serde_json::to_string(&LockHolder { host, pid, at, nonce, names: names.clone() });
        let line = line.map_err(|error| self.cannot(&error.into()))?;
        self.put((line + "\n").as_bytes())?;
        let put =
            disk::sync(&self.file, &self.path).and_then(|()| disk::sync_folder(disk::folder_of(&self.path)));
        put.map_err(|error| self.cannot(&error))?;
        self.mine.extend(names);
        Ok(())
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        disk::write(&mut self.file, &self.path, bytes).map_err(|error| self.cannot(&error))
    }

    fn cannot(&self, error: &io::Error) -> Error {
        Error::file(&self.path, format!("cannot be written ({error})"))
    }

    /// Removes the file and frees the place. Without it, the next holder finds what this one has announced. The file stays while there is
    /// something of a holder that may live.
    pub fn release(self) {
        let is_there = |name: &String| fs::symlink_metadata(self.path.with_file_name(name)).is_ok();
        if self.unsure.iter().any(is_there) {
            return;
        }
        let is_ours =
            fs::symlink_metadata(&self.path).and_then(|there| Ok(is_same(&self.file.metadata()?, &there)));
        if is_ours.unwrap_or(false)
            && let Err(error) = disk::remove_file(&self.path)
        {
            log::warn!("{}: cannot be removed ({error})", self.path.display());
        }
    }

    /// Waits until the lock with this nonce is seen at `path`: whoever sees it sees the holder's folder.
    ///
    /// # Errors
    /// If it is not there.
    pub(crate) fn see(path: &Path, nonce: &str, patience: Duration) -> Result<()> {
        let is_there = || {
            let text = regular::open(path).and_then(|file| read(&file)).unwrap_or_default();
            is_ours(&text) && holders(&text).any(|holder| holder.nonce == nonce)
        };
        if seen(disk::folder_of(path), patience, is_there) {
            return Ok(());
        }
        let reason =
            "is not the folder that the first rank writes to; give one on a file system that all ranks share";
        Err(Error::file(disk::folder_of(path), reason))
    }
}

/// Returns how long ranks on these hosts wait to see each other's files.
pub(crate) fn patience<'a>(hosts: impl IntoIterator<Item = &'a str>) -> Duration {
    PATIENCE[usize::from(!hosts.into_iter().all_equal())]
}

/// Waits until something that another rank has made in a folder is seen; returns whether it is.
pub(crate) fn seen(folder: &Path, patience: Duration, is_there: impl Fn() -> bool) -> bool {
    let end = Instant::now() + patience;
    loop {
        // Opening the folder makes network file systems ask their server again.
        drop(fs::read_dir(folder));
        if is_there() {
            return true;
        }
        if Instant::now() > end {
            return false;
        }
        thread::sleep(TICK);
    }
}

/// Returns the complete lines of a lock file.
fn holders(text: &str) -> impl Iterator<Item = LockHolder> + '_ {
    text.lines().skip(1).filter_map(|line| serde_json::from_str(line).ok())
}

/// A process may be killed at any byte of the title.
fn is_ours(text: &str) -> bool {
    text.starts_with(TITLE) || TITLE.starts_with(text)
}

fn read(mut file: &File) -> io::Result<String> {
    let mut text = Vec::new();
    io::Seek::rewind(&mut file)?;
    file.take(LONGEST).read_to_end(&mut text)?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

fn foreign(path: &Path) -> Error {
    Error::file(path, "is in the way, and no lock of this program; move it, or write to another place")
}

/// Returns the error for a place that somebody else holds; `None` if the holder has not said yet who it is, or is about to free it.
fn held(path: &Path) -> Option<Error> {
    let text = regular::open(path).and_then(|file| read(&file)).unwrap_or_default();
    if !is_ours(&text) {
        return Some(foreign(path));
    }
    let LockHolder { host, pid, nonce, .. } = holders(&text).last()?;
    let since = holders(&text).find(|holder| holder.nonce == nonce)?.at;
    let seconds = now().as_secs().saturating_sub(since);
    let who = format!("process {pid} on host {host:?} for {seconds} s");
    Some(Error::file(
        path,
        format!("is held by {who}, which writes there; wait for it, or write to a place of its own"),
    ))
}

/// Returns a number that nobody else has.
fn nonce() -> String {
    // The keys of the hash are random.
    format!("{:016x}", RandomState::new().hash_one((process::id(), now())))
}

/// The time since 1970.
fn now() -> Duration {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
}

#[cfg(unix)]
fn is_same(a: &Metadata, b: &Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    (a.dev(), a.ino()) == (b.dev(), b.ino())
}

#[cfg(not(unix))]
fn is_same(a: &Metadata, b: &Metadata) -> bool {
    a.is_file() && b.is_file()
}
