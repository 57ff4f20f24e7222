//! The file of a job's secret, for jobs on one host.
use super::secret::{BYTES, random};
use super::{LaunchInfo, SecretScope};
use crate::{Error, Result};
use rustix::fs::OFlags;
use rustix::process::geteuid;
use sha2::{Digest, Sha256};
use std::fmt;
use std::fs::{self, DirBuilder, File, Metadata, OpenOptions};
use std::io::{self, ErrorKind, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::Duration;

/// The most ancestors to look at.
const ANCESTORS: usize = 64;

/// The length of the name of a file.
const DIGITS: usize = 32;

/// After this time a file that nobody has locked is of a rank 0 that was killed.
const LEFT: Duration = Duration::from_secs(24 * 60 * 60);

/// The file of rank 0, which goes when this is dropped.
pub(crate) struct SecretFile {
    path: PathBuf,
    /// Locked for as long as rank 0 lives.
    _file: File,
    pub(super) secret: [u8; BYTES],
}

impl fmt::Debug for SecretFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "SecretFile({:?})", self.path)
    }
}

impl SecretFile {
    /// Writes a new secret to the file of this job, which rank 0 alone does: it holds the port.
    pub(super) fn create(info: &LaunchInfo, scope: SecretScope) -> Result<Self> {
        let path = path(info, scope)?;
        remove_left(&folder()?);
        let secret = random()?;
        let failed = |error: io::Error| {
            let fix = "set XDG_RUNTIME_DIR to a folder of this user that all ranks see, or CANDLE_DIST_TOKEN";
            Error::Init(format!("rank 0 cannot write the secret of the job to {path:?}: {error}; {fix}"))
        };
        // Complete before others see it. Nobody else has this name, and a link there is not followed.
        let draft =
            path.with_extension(format!("{}-{:x}", std::process::id(), u64::from_le_bytes(random()?)));
        let mut file =
            OpenOptions::new().write(true).create_new(true).mode(0o600).open(&draft).map_err(failed)?;
        // A file system without locks keeps all files.
        let _ = file.try_lock();
        let written = file.write_all(&secret).and_then(|()| fs::rename(&draft, &path));
        if written.is_err() {
            let _ = fs::remove_file(&draft);
        }
        written.map_err(failed)?;
        Ok(Self { path, _file: file, secret })
    }

    /// Returns the secret that rank 0 has written. The error is `NotFound` until then.
    pub(super) fn read(info: &LaunchInfo, scope: SecretScope) -> Result<io::Result<[u8; BYTES]>> {
        let path = path(info, scope)?;
        let explained = |error: io::Error| match error.kind() {
            ErrorKind::NotFound => io::Error::new(
                ErrorKind::NotFound,
                format!(
                    "there is no {path:?}, which rank 0 writes if this user and this launcher have started it too and it \
                     still waits for ranks; otherwise set CANDLE_DIST_TOKEN on all ranks"
                ),
            ),
            kind => io::Error::new(kind, format!("{path:?} is not a secret of this user: {error}")),
        };
        Ok(contents(&path).map_err(explained))
    }
}

impl Drop for SecretFile {
    fn drop(&mut self) {
        // Another world of these processes may have replaced it.
        if matches!(contents(&self.path), Ok(secret) if secret == self.secret) {
            let _ = fs::remove_file(&self.path);
        }
    }
}

fn contents(path: &Path) -> io::Result<[u8; BYTES]> {
    let mut secret = [0; BYTES];
    opened(path)?.read_exact(&mut secret)?;
    Ok(secret)
}

/// Opens a file that only this user can read.
fn opened(path: &Path) -> io::Result<File> {
    // A FIFO would block, and a link may lead to a file of someone else.
    let flags = (OFlags::NOFOLLOW | OFlags::NONBLOCK).bits();
    let file = File::options().read(true).custom_flags(flags.cast_signed()).open(path)?;
    let found = file.metadata()?;
    if !found.is_file() || !is_ours(&found) {
        return Err(io::Error::other("it is no file, or others may write or read it"));
    }
    Ok(file)
}

/// Removes the secrets of jobs whose rank 0 was killed.
fn remove_left(folder: &Path) {
    let Ok(entries) = fs::read_dir(folder) else { return };
    for path in entries.filter_map(|entry| Some(entry.ok()?.path())) {
        let stem = path.file_stem().unwrap_or_default().as_encoded_bytes();
        let is_name = stem.len() == DIGITS && stem.iter().all(u8::is_ascii_hexdigit);
        let Some(file) = is_name.then(|| opened(&path).ok()).flatten() else { continue };
        let age =
            file.metadata().and_then(|found| found.modified()).map(|at| at.elapsed().unwrap_or_default());
        if age.is_ok_and(|age| age > LEFT) && file.try_lock().is_ok() {
            let _ = fs::remove_file(&path);
        }
    }
}

/// Returns whether this user alone owns and may use something.
fn is_ours(found: &Metadata) -> bool {
    found.uid() == geteuid().as_raw() && found.mode() & 0o077 == 0
}

/// Returns the file of a job. Its name follows from what all its processes know.
fn path(info: &LaunchInfo, scope: SecretScope) -> Result<PathBuf> {
    let launcher = match scope {
        SecretScope::Launcher(variable) => launcher(variable)?.to_string(),
        SecretScope::Job | SecretScope::Address => String::new(),
    };
    // Process ids begin anew with each start of the system.
    let boot = fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let mut hash = Sha256::new();
    for part in [boot.trim(), &launcher, &info.job, &info.address, &info.world_size.to_string()] {
        hash.update(part.len().to_le_bytes());
        hash.update(part);
    }
    let digits =
        hash.finalize().iter().take(DIGITS / 2).map(|byte| format!("{byte:02x}")).collect::<String>();
    Ok(folder()?.join(digits))
}

/// Returns the folder of secrets, which only this user can open.
fn folder() -> Result<PathBuf> {
    let is_private =
        |path: &PathBuf| fs::symlink_metadata(path).is_ok_and(|found| found.is_dir() && is_ours(&found));
    let runtime = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from).filter(|path| path.is_absolute());
    let path = match runtime.filter(is_private) {
        Some(runtime) => runtime.join("candle-dist"),
        None => std::env::temp_dir().join(format!("candle-dist-{}", geteuid().as_raw())),
    };
    match DirBuilder::new().mode(0o700).create(&path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            let fix = "set XDG_RUNTIME_DIR to a folder of this user that all ranks see, or CANDLE_DIST_TOKEN";
            return Err(Error::Init(format!("the folder {path:?} cannot be made: {error}; {fix}")));
        }
        _ => {}
    }
    if is_private(&path) {
        return Ok(path);
    }
    Err(Error::Init(format!(
        "{path:?} is not a folder that this user owns and nobody else may open; remove it, or set XDG_RUNTIME_DIR to a \
         folder of this user, or CANDLE_DIST_TOKEN"
    )))
}

/// A process: its number, and when it started.
struct Process {
    id: u32,
    started: String,
}

impl fmt::Display for Process {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} {}", self.id, self.started)
    }
}

/// Returns the nearest ancestor that `variable` was not set for: the launcher that sets it, behind shells and wrappers. A
/// shell that forked for a part of a script counts as the shell of the script.
///
/// The error is that the environment of an ancestor cannot be read: ranks could find different launchers then.
fn launcher(variable: &str) -> Result<Process> {
    let parent = |id| stat(id).and_then(|fields| fields.first()?.parse().ok()).filter(|parent| *parent > 0);
    let mut id = std::os::unix::process::parent_id();
    for _ in 0..ANCESTORS {
        let Some(next) = parent(id) else { break };
        let is_below = has(id, variable).map_err(|error| {
            Error::Init(format!(
                "the environment of process {id}, from which this one comes, cannot be read: {error}; so it is not known which \
                 launcher has started this rank, and whose secret it has; set CANDLE_DIST_TOKEN to a random text, equal on \
                 all ranks"
            ))
        })?;
        match is_below || is_fork(id, next) {
            true => id = next,
            false => break,
        }
    }
    Ok(Process { id, started: stat(id).and_then(|fields| fields.get(18).cloned()).unwrap_or_default() })
}

/// Returns whether a process runs what its parent runs, which it has not replaced by another program.
fn is_fork(id: u32, parent: u32) -> bool {
    let of = |id: u32, file| fs::read(format!("/proc/{id}/{file}")).ok();
    ["cmdline", "environ"].iter().all(|file| of(id, file).is_some_and(|own| Some(own) == of(parent, file)))
}

/// Returns the fields of a process from its parent's number on, as proc(5) lists them.
fn stat(id: u32) -> Option<Vec<String>> {
    let text = fs::read_to_string(format!("/proc/{id}/stat")).ok()?;
    // The name of the program before them may have any characters.
    let (_, fields) = text.rsplit_once(')')?;
    Some(fields.split_whitespace().skip(1).map(str::to_string).collect())
}

/// Returns whether a process was started with a variable.
fn has(id: u32, variable: &str) -> io::Result<bool> {
    let set = format!("{variable}=");
    let all = fs::read(format!("/proc/{id}/environ"))?;
    Ok(all.split(|byte| *byte == 0).any(|one| one.starts_with(set.as_bytes())))
}
