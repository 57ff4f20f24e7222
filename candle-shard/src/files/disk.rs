//! The calls to the file system that write files.
//!
//! Tests make any call fail, or all calls from one on, as if the process had been killed there
//! (`files/checkpoint/crashes.rs`).
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::Path;

pub(crate) fn create_folder(path: &Path) -> io::Result<()> {
    call("create_folder", path)?;
    fs::create_dir_all(path)
}

/// Creates a file under a name that nothing has, not even a link.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    call("create", path)?;
    File::create_new(path)
}

/// Opens a file to read it and to write at its end, and creates it if it is not there.
///
/// # Errors
/// `AlreadyExists` if something other than a file is there; a link is not followed.
pub(crate) fn append(path: &Path) -> io::Result<File> {
    call("append", path)?;
    let mut options = OpenOptions::new();
    options.read(true).append(true);
    match options.clone().create_new(true).open(path) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {
            match fs::symlink_metadata(path)?.is_file() {
                true => options.open(path),
                false => Err(error),
            }
        }
        opened => opened,
    }
}

/// Returns whether there is a regular file; a link is none.
pub(crate) fn is_file(path: &Path) -> io::Result<bool> {
    match fs::symlink_metadata(path) {
        Ok(about) => Ok(about.is_file()),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(false),
        Err(error) => Err(error),
    }
}

pub(crate) fn write(file: &mut File, path: &Path, bytes: &[u8]) -> io::Result<()> {
    call("write", path)?;
    file.write_all(bytes)
}

/// Waits until a file's contents are on the disk.
pub(crate) fn sync(file: &File, path: &Path) -> io::Result<()> {
    call("sync", path)?;
    file.sync_all()
}

/// Waits until the names in a folder are on the disk, on systems that can sync a folder.
pub(crate) fn sync_folder(path: &Path) -> io::Result<()> {
    call("sync_folder", path)?;
    if !cfg!(unix) {
        return Ok(());
    }
    match File::open(path)?.sync_all() {
        Err(error) if matches!(error.kind(), io::ErrorKind::InvalidInput | io::ErrorKind::Unsupported) => {
            Ok(())
        }
        synced => synced,
    }
}

/// Renames a file, replacing an existing one atomically.
pub(crate) fn rename(from: &Path, to: &Path) -> io::Result<()> {
    call("rename", to)?;
    fs::rename(from, to)
}

/// Removes a file. One that is gone already is no error: after a failed save each rank removes what it wrote, while rank 0 removes
/// what all of them wrote.
pub(crate) fn remove_file(path: &Path) -> io::Result<()> {
    call("remove_file", path)?;
    match fs::remove_file(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed,
    }
}

/// Removes an empty folder.
pub(crate) fn remove_folder(path: &Path) -> io::Result<()> {
    call("remove_folder", path)?;
    fs::remove_dir(path)
}

/// Returns the folder that contains a path.
pub(crate) fn folder_of(path: &Path) -> &Path {
    path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."))
}

#[cfg(not(test))]
#[allow(clippy::unnecessary_wraps)] // tests make it fail
const fn call(_: &str, _: &Path) -> io::Result<()> {
    Ok(())
}

#[cfg(test)]
use faults::call;

/// Calls that fail on purpose.
#[cfg(test)]
pub(crate) mod faults {
    use std::fs;
    use std::io;
    use std::path::Path;
    use std::sync::{Mutex, PoisonError};

    /// A fault at one call.
    #[derive(Clone, Copy, Debug, PartialEq)]
    pub(crate) enum Fault {
        /// The call fails, and later ones succeed.
        Fails,
        /// The call fails, and another rank removes each file just before this one does.
        FailsAndRaces,
        /// Neither this call nor any later one is made.
        Kills,
    }

    /// The calls of all threads, and the index of the one with a fault.
    #[derive(Default)]
    struct Recorded {
        at: Option<(usize, Fault)>,
        calls: Vec<String>,
    }

    static RECORDED: Mutex<Option<Recorded>> = Mutex::new(None);

    /// Runs `f` with this fault; returns its result, the calls that it made or tried, and whether the fault occurred.
    pub(crate) fn with<T>(at: Option<(usize, Fault)>, f: impl FnOnce() -> T) -> (T, Vec<String>, bool) {
        let lock = || RECORDED.lock().unwrap_or_else(PoisonError::into_inner);
        *lock() = Some(Recorded { at, calls: Vec::new() });
        let made = f();
        let calls = lock().take().unwrap_or_default().calls;
        let came = at.is_some_and(|(at, _)| calls.len() > at);
        (made, calls, came)
    }

    pub(super) fn call(name: &str, path: &Path) -> io::Result<()> {
        let mut recorded = RECORDED.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(recorded) = recorded.as_mut() else { return Ok(()) };
        let (n, file) = (recorded.calls.len(), path.file_name().unwrap_or_default().to_string_lossy());
        recorded.calls.push(format!("{name} {file}"));
        match recorded.at {
            Some((at, Fault::Fails | Fault::FailsAndRaces)) if n == at => Err(io::Error::other("on purpose")),
            Some((_, Fault::FailsAndRaces)) if name == "remove_file" => {
                fs::remove_file(path).ok();
                Ok(())
            }
            Some((at, Fault::Kills)) if n >= at => Err(io::Error::other("killed on purpose")),
            _ => Ok(()),
        }
    }
}
