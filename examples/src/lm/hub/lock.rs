//! Programs that want to write one file: one does, and the others wait.

use std::fs::{self, File, TryLockError};
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
    let file = File::create(path).with_context(|| format!("{}", path.display()))?;
    let length = || fs::metadata(grows).map_or(0, |about| about.len());
    let patience = patience * 2;
    let (mut waits, mut seen) = (Some(waits), (length(), Instant::now()));
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(file),
            Err(TryLockError::WouldBlock) => {}
            Err(TryLockError::Error(error)) => {
                let remedy = || {
                    format!("{} cannot be locked: set HF_HOME to a folder on a file system with locks", path.display())
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
