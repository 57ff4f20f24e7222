//! Temporary folders for tests.
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

/// An empty folder that is removed when this value is dropped.
///
/// ```
/// use test_utils::Scratch;
///
/// let folder = Scratch::new("doc");
/// std::fs::write(folder.path("a.txt"), "a").unwrap();
/// let path = folder.path("");
/// drop(folder);
/// assert!(!path.exists());
/// ```
#[derive(Debug)]
pub struct Scratch {
    folder: PathBuf,
    is_shared: bool,
}

impl Scratch {
    /// Creates a new folder on every call, for this process alone.
    ///
    /// # Panics
    /// If the folder cannot be created.
    pub fn new(name: &str) -> Self {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let nth = MADE.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("{name}-{}-{nth}", std::process::id()));
        if let Err(error) = fs::create_dir_all(&folder) {
            panic!("{}: {error}", folder.display());
        }
        Self { folder, is_shared: false }
    }

    /// Creates a folder that all ranks share, also where they are processes: then it goes with their job. Only ranks
    /// change it, because each process runs the rest of the test.
    ///
    /// # Panics
    /// If the folder cannot be created.
    pub fn of_ranks(name: &str) -> Self {
        match shared(name) {
            Some(folder) => Self { folder, is_shared: true },
            None => Self::new(name),
        }
    }

    /// Returns a folder with a copy of what is in this one, for this process alone.
    ///
    /// # Panics
    /// If the folder cannot be copied.
    pub fn copy(&self) -> Self {
        let copy = Self::new("copy");
        copy_all(&self.folder, &copy.folder)
            .unwrap_or_else(|error| panic!("{}: {error}", self.folder.display()));
        copy
    }

    /// Returns a path in the folder.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.folder.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        if !self.is_shared {
            // If it cannot be removed, the system cleans it up.
            fs::remove_dir_all(&self.folder).ok();
        }
    }
}

/// Copies what is in a folder to another one.
fn copy_all(from: &Path, to: &Path) -> io::Result<()> {
    for entry in fs::read_dir(from)? {
        let entry = entry?;
        let to = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            fs::create_dir_all(&to)?;
            copy_all(&entry.path(), &to)?;
        } else {
            fs::copy(entry.path(), to)?;
        }
    }
    Ok(())
}

/// Returns the folder of all processes, if ranks are processes.
#[cfg(feature = "mpi")]
fn shared(name: &str) -> Option<PathBuf> {
    crate::over_mpi().then(|| crate::processes::shared_folder(name))
}

#[cfg(not(feature = "mpi"))]
fn shared(_: &str) -> Option<PathBuf> {
    None
}
