//! Programs that want to write one file: one does, and the others wait.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, ErrorKind};
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

/// How often a program that waits looks.
const TICK: Duration = Duration::from_millis(100);

/// Waits for the lock at `path`, which ends with the returned file, or with the program that holds it.
///
/// `waits` is called once if another program has the lock.
///
/// # Errors
/// If the file system has no locks, or the file `grows` has not become longer for longer than a program with this `patience` waits for a server.
pub(super) fn hold(path: &Path, grows: &Path, patience: Duration, waits: impl FnOnce()) -> Result<File> {
    if let Some(folder) = path.parent() {
        fs::create_dir_all(folder).with_context(|| format!("{}", folder.display()))?;
    }
    let file = opened(path).with_context(|| format!("{}", path.display()))?;
    let length = || fs::metadata(grows).map_or(0, |about| about.len());
    let patience = patience * 2;
    let (mut waits, mut seen) = (Some(waits), (length(), Instant::now()));
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => {
                let remedy = || {
                    format!(
                        "{} cannot be locked: set HF_HOME to a folder on a file system with locks",
                        path.display()
                    )
                };
                return Err(error).with_context(remedy);
            }
        }
        if let Some(waits) = waits.take() {
            waits();
        }
        if seen.0 != length() {
            seen = (length(), Instant::now());
        }
        if seen.1.elapsed() > patience {
            bail!(
                "another program holds {} and has written nothing for {} s: end it, or set HF_HUB_DOWNLOAD_TIMEOUT to more",
                path.display(),
                patience.as_secs()
            );
        }
        thread::sleep(TICK);
    }
}

/// Opens the file of a lock, and makes it if it is not there. What it has stays, since it may be another file by its name.
fn opened(path: &Path) -> io::Result<File> {
    match OpenOptions::new().write(true).create_new(true).open(path) {
        Err(error) if error.kind() == ErrorKind::AlreadyExists => match fs::symlink_metadata(path)?.is_file()
        {
            true => OpenOptions::new().write(true).open(path),
            // A link may lead anywhere, and a pipe waits.
            false => Err(error),
        },
        opened => opened,
    }
}
