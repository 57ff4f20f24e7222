//! One file of tensors: its header, and reads at an offset.
use super::entry::Entry;
use super::gguf::{self, Metadata};
use super::header::Header;
use crate::files::digests::{Digests, Stamp};
use crate::files::regular;
use crate::{Error, Result};
use candle_dist::bits::digest_bytes;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The longest header that is accepted, as in other readers of the format.
const LONGEST_HEADER: u64 = 100_000_000;

/// An open file and the contents of its header.
pub(crate) struct WeightFile {
    pub(super) path: PathBuf,
    pub(super) entries: BTreeMap<String, Entry>,
    /// The metadata of a GGUF file.
    pub(super) metadata: Option<Metadata>,
    /// Where its header ends, and where it ends.
    data: Range<u64>,
    digests: Option<Digests>,
    opened: Mutex<Opened>,
}

/// The file, and the last block that was read of it because a part was wanted.
struct Opened {
    file: File,
    block: Option<usize>,
    bytes: Vec<u8>,
}

impl WeightFile {
    /// Reads the header and checks all of it against the file's length, so that a truncated file is refused here.
    pub(crate) fn open(path: &Path) -> Result<Self> {
        let failed = |error: io::Error| Error::file(path, format!("cannot be read ({error})"));
        let mut file = regular::open(path).map_err(failed)?;
        let length = file.metadata().map_err(failed)?.len();
        let mut magic = [0; gguf::MAGIC.len()];
        let is_gguf = match length < magic.len() as u64 {
            true => false,
            false => file.read_exact(&mut magic).map(|()| magic == gguf::MAGIC).map_err(failed)?,
        };
        file.rewind().map_err(failed)?;
        if is_gguf || path.extension().is_some_and(|extension| extension == "gguf") {
            return Self::open_gguf(path, file, length);
        }
        let wrong = |reason: String| Error::file(path, format!("{reason}; is it a complete safetensors file?"));
        let mut first = [0; 8];
        if length < 8 {
            return Err(wrong(format!("has {length} bytes, too few for a header")));
        }
        file.read_exact(&mut first).map_err(failed)?;
        let header_length = u64::from_le_bytes(first);
        if header_length > LONGEST_HEADER || header_length > length - 8 {
            return Err(wrong(format!("announces a header of {header_length} bytes and has {length}")));
        }
        let mut header = vec![0; header_length as usize];
        file.read_exact(&mut header).map_err(failed)?;
        let data = header_length + 8..length;
        let Header { entries, digests } = Header::read(&header, data.start, data.end - data.start).map_err(wrong)?;
        Ok(Self { path: path.into(), entries, metadata: None, data, digests, opened: Mutex::new(Opened::new(file)) })
    }

    fn open_gguf(path: &Path, file: File, length: u64) -> Result<Self> {
        let header = file.try_clone().map_err(|error| error.to_string()).and_then(|file| gguf::read(file, length));
        let (metadata, entries) =
            header.map_err(|why| Error::file(path, format!("{why}; is it a complete GGUF file?")))?;
        let opened = Mutex::new(Opened::new(file));
        Ok(Self { path: path.into(), entries, metadata: Some(metadata), data: 0..length, digests: None, opened })
    }

    /// Returns the length of the file and the digest of its header, if it has digests.
    pub(crate) fn stamp(&self) -> Option<Stamp> {
        self.digests.as_ref().map(|digests| Stamp { length: self.data.end, digest: digests.header })
    }

    /// Fills `bytes` with the bytes at offset `at`; returns how many bytes were read for that.
    ///
    /// Where the file has digests, whole blocks are read and compared with them.
    pub(super) fn read_at(&self, at: u64, bytes: &mut [u8]) -> Result<u64> {
        let mut opened = self.opened.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(digests) = self.digests.as_ref().filter(|_| !bytes.is_empty()) else {
            return opened
                .read(at, bytes)
                .map(|()| bytes.len() as u64)
                .map_err(|error| self.unread(at, bytes.len(), &error));
        };
        let (mut filled, mut read) = (0, 0);
        while filled < bytes.len() {
            let from = at - self.data.start + filled as u64;
            let nth = (from / digests.block as u64) as usize;
            let start = self.data.start + nth as u64 * digests.block as u64;
            let len = (self.data.end - start).min(digests.block as u64) as usize;
            let skipped = (self.data.start + from - start) as usize;
            let here = &mut bytes[filled..];
            let count = here.len().min(len - skipped);
            if count == len {
                opened.read(start, &mut here[..len]).map_err(|error| self.unread(start, len, &error))?;
                self.compare(digests, nth, start, &here[..len])?;
                read += len as u64;
            } else {
                if opened.block != Some(nth) {
                    let mut block = std::mem::take(&mut opened.bytes);
                    (opened.block, read) = (None, read + len as u64);
                    block.resize(len, 0);
                    opened.read(start, &mut block).map_err(|error| self.unread(start, len, &error))?;
                    self.compare(digests, nth, start, &block)?;
                    (opened.block, opened.bytes) = (Some(nth), block);
                }
                here[..count].copy_from_slice(&opened.bytes[skipped..skipped + count]);
            }
            filled += count;
        }
        Ok(read)
    }

    /// Reads all bytes that have digests, and compares them.
    pub(crate) fn verify(&self) -> Result<()> {
        let Some(digests) = &self.digests else { return Ok(()) };
        let mut bytes = vec![0; digests.block.min((self.data.end - self.data.start) as usize)];
        for nth in 0..digests.blocks.len() as u64 {
            let start = self.data.start + nth * digests.block as u64;
            let len = (self.data.end - start).min(digests.block as u64) as usize;
            self.read_at(start, &mut bytes[..len])?;
        }
        Ok(())
    }

    fn compare(&self, digests: &Digests, nth: usize, start: u64, bytes: &[u8]) -> Result<()> {
        if digests.blocks.get(nth) == Some(&digest_bytes(bytes)) {
            return Ok(());
        }
        let end = start + bytes.len() as u64;
        let reason = format!("the bytes {start} to {end} are not those that were written");
        Err(Error::file(&self.path, format!("{reason}; the file is damaged, take another copy of it")))
    }

    fn unread(&self, at: u64, n: usize, error: &io::Error) -> Error {
        Error::file(&self.path, format!("{n} bytes at {at} cannot be read ({error})"))
    }
}

impl Opened {
    fn new(file: File) -> Self {
        Self { file, block: None, bytes: Vec::new() }
    }

    fn read(&mut self, at: u64, bytes: &mut [u8]) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(at)).and_then(|_| self.file.read_exact(bytes))
    }
}
