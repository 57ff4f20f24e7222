//! Files that are read: regular ones, of a size that fits what they are.
//!
//! A name can lead to a pipe that nobody writes to, to a device without an end, or to a file that is larger than memory.
//! Everything that this workspace reads by name is opened here, so that those are errors at once. Only a text that a user names may come
//! from a pipe.
//!
//! ```
//! use candle_shard::regular;
//!
//! assert!(regular::read_text("Cargo.toml", regular::CONFIG)?.contains("candle-shard"));
//! assert!(regular::read("Cargo.toml", 9).unwrap_err().to_string().contains("at most 9"));
//! assert!(regular::open("src").unwrap_err().to_string().contains("a folder"));
//! # Ok::<(), std::io::Error>(())
//! ```
use std::fs::{File, FileType, OpenOptions};
use std::io::{self, ErrorKind, Read, Seek};
use std::path::Path;

/// The most bytes of a config, and of other files of settings.
pub const CONFIG: u64 = 16 << 20;
/// The most bytes of a tokenizer.
pub const TOKENIZER: u64 = 64 << 20;
/// The most bytes of an index, which has a line for each tensor.
pub const INDEX: u64 = 1 << 30;
/// The most bytes of a text that is read as a whole.
pub const TEXT: u64 = 4 << 30;
/// The most bytes of a text that is read from a stream, whose length is not known before.
pub const STREAM: u64 = 256 << 20;

/// What stands in the place of a large file until Git LFS has fetched it begins with this, and is short.
const POINTER: &[u8] = b"version https://git-lfs.github.com/spec/";
const LONGEST_POINTER: u64 = 1024;

/// Opens a file for reading, if it is a regular one. Never waits for another program.
///
/// # Errors
/// Those of the file system; if the name leads to a folder, pipe, socket or device, which is named; if Git LFS has not fetched the file.
pub fn open(path: impl AsRef<Path>) -> io::Result<File> {
    let path = path.as_ref();
    // Opening a device may have effects by itself.
    check(std::fs::metadata(path)?.file_type())?;
    let mut options = OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    {
        // The name may lead to a pipe by now.
        use std::os::unix::fs::OpenOptionsExt;
        options.custom_flags((rustix::fs::OFlags::NONBLOCK | rustix::fs::OFlags::NOCTTY).bits() as i32);
    }
    let mut file = options.open(path)?;
    let about = file.metadata()?;
    check(about.file_type())?;
    if (POINTER.len() as u64..LONGEST_POINTER).contains(&about.len()) {
        let mut first = [0; POINTER.len()];
        let is_pointer = file.read_exact(&mut first).is_ok() && first == POINTER;
        file.rewind()?;
        if is_pointer {
            let reason =
                "it is a pointer of Git LFS in the place of the file; fetch the file with `git lfs pull`";
            return Err(io::Error::new(ErrorKind::InvalidData, reason));
        }
    }
    Ok(file)
}

/// Reads a whole file that has at most so many bytes. A larger one is not read at all.
///
/// # Errors
/// Those of [`open`]; if the file has more bytes.
pub fn read(path: impl AsRef<Path>, most: u64) -> io::Result<Vec<u8>> {
    let file = open(path)?;
    let length = file.metadata()?.len();
    if length > most {
        return Err(too_large(length, most));
    }
    let mut bytes = Vec::new();
    let room = usize::try_from(length).map_err(|_| too_large(length, most))?;
    bytes.try_reserve_exact(room).map_err(|_| ErrorKind::OutOfMemory)?;
    // The file may grow meanwhile, and some of `/proc` say that they are empty.
    fill(&mut bytes, file, most)?;
    Ok(bytes)
}

/// Reads a whole file of UTF-8 that has at most so many bytes.
///
/// # Errors
/// Those of [`read`]; if the file is no UTF-8.
pub fn read_text(path: impl AsRef<Path>, most: u64) -> io::Result<String> {
    text(read(path, most)?)
}

/// Reads a whole text of UTF-8 that a user names: a regular file of at most [`TEXT`] bytes, or a pipe of at most [`STREAM`], such as
/// `/dev/stdin` or that of a process substitution. Waits for who writes to the pipe.
///
/// # Errors
/// Those of [`read_text`] and [`read_stream`].
pub fn read_named(path: impl AsRef<Path>) -> io::Result<String> {
    let path = path.as_ref();
    if is_pipe(path) {
        return read_stream(File::open(path)?, STREAM);
    }
    read_text(path, TEXT)
}

/// Returns whether a name leads to a pipe.
pub fn is_pipe(path: impl AsRef<Path>) -> bool {
    #[cfg(unix)]
    return std::fs::metadata(path)
        .is_ok_and(|about| std::os::unix::fs::FileTypeExt::is_fifo(&about.file_type()));
    #[cfg(not(unix))]
    return false;
}

/// Reads a stream of UTF-8 to its end, which comes before so many bytes.
///
/// # Errors
/// Those of the stream; if it has more bytes, or they are no UTF-8.
pub fn read_stream(stream: impl Read, most: u64) -> io::Result<String> {
    let mut bytes = Vec::new();
    fill(&mut bytes, stream, most)?;
    text(bytes)
}

fn fill(bytes: &mut Vec<u8>, stream: impl Read, most: u64) -> io::Result<()> {
    stream.take(most.saturating_add(1)).read_to_end(bytes)?;
    if bytes.len() as u64 > most { Err(too_large(bytes.len() as u64, most)) } else { Ok(()) }
}

fn text(bytes: Vec<u8>) -> io::Result<String> {
    String::from_utf8(bytes).map_err(|error| io::Error::new(ErrorKind::InvalidData, error.utf8_error()))
}

fn too_large(length: u64, most: u64) -> io::Error {
    io::Error::new(
        ErrorKind::FileTooLarge,
        format!("it has {length} bytes or more, and at most {most} are read"),
    )
}

fn check(kind: FileType) -> io::Result<()> {
    if kind.is_file() {
        return Ok(());
    }
    let (error, kind) = match kind {
        kind if kind.is_dir() => (ErrorKind::IsADirectory, "a folder"),
        kind => (ErrorKind::InvalidInput, special(kind)),
    };
    Err(io::Error::new(error, format!("it is {kind}, and only regular files are read")))
}

#[cfg(unix)]
fn special(kind: FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    match kind {
        kind if kind.is_fifo() => "a pipe",
        kind if kind.is_socket() => "a socket",
        _ => "a device",
    }
}

#[cfg(not(unix))]
fn special(_: FileType) -> &'static str {
    "no file"
}
