//! Temporary folders for tests.
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
pub struct Scratch(PathBuf);

impl Scratch {
    /// Creates a new folder on every call.
    ///
    /// # Panics
    /// If the folder cannot be created.
    pub fn new(name: &str) -> Self {
        static MADE: AtomicUsize = AtomicUsize::new(0);
        let nth = MADE.fetch_add(1, Ordering::Relaxed);
        let folder = std::env::temp_dir().join(format!("{name}-{}-{nth}", std::process::id()));
        if let Err(error) = std::fs::create_dir_all(&folder) {
            panic!("{}: {error}", folder.display());
        }
        Self(folder)
    }

    /// Returns a path in the folder.
    pub fn path(&self, name: impl AsRef<Path>) -> PathBuf {
        self.0.join(name)
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // If it cannot be removed, the system cleans it up.
        std::fs::remove_dir_all(&self.0).ok();
    }
}
