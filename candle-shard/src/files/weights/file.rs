//! One file of tensors: its header, and reads at an offset.
use super::entry::Entry;
use super::gguf::{self, GgufMetadata};
use super::header::Header;
use crate::files::digests::{Digests, FileStamp};
use crate::files::regular;
use crate::{Error, Result};
use candle_dist::bits::digest_bytes;
use itertools::Itertools;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// The longest header that is accepted, as in other readers of the format.
const LONGEST_HEADER: u64 = 100_000_000;

/// The bytes of a tensor that tell it from others: enough for those of trained models, and little to read.
const SAMPLE: usize = 128;

/// An open file and the contents of its header.
pub(crate) struct WeightFile {
    pub(super) path: PathBuf,
    pub(super) entries: BTreeMap<String, Entry>,
    /// The metadata of a GGUF file.
    pub(super) metadata: Option<GgufMetadata>,
    /// Where its header ends, and where it ends.
    data: Range<u64>,
    digests: Option<Digests>,
    file: File,
    /// The last block that was read because a part was wanted: the next tensor may be a small one in it.
    last: Mutex<Option<DigestBlock>>,
}

/// A block that was compared with its digest: its number, and its bytes.
pub(super) type DigestBlock = (usize, Arc<Vec<u8>>);

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
        let wrong =
            |reason: String| Error::file(path, format!("{reason}; is it a complete safetensors file?"));
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
        let Header { entries, digests } =
            Header::read(&header, data.start, data.end - data.start).map_err(wrong)?;
        Ok(Self { path: path.into(), entries, metadata: None, data, digests, file, last: Mutex::default() })
    }

    fn open_gguf(path: &Path, file: File, length: u64) -> Result<Self> {
        let header =
            file.try_clone().map_err(|error| error.to_string()).and_then(|file| gguf::read(file, length));
        let (metadata, entries) =
            header.map_err(|why| Error::file(path, format!("{why}; is it a complete GGUF file?")))?;
        let (metadata, data, last) = (Some(metadata), 0..length, Mutex::default());
        Ok(Self { path: path.into(), entries, metadata, data, digests: None, file, last })
    }

    /// Returns the length of the file and the digest of its header, if it has digests.
    pub(crate) fn stamp(&self) -> Option<FileStamp> {
        self.digests.as_ref().map(|digests| FileStamp { length: self.data.end, digest: digests.header })
    }

    /// Returns what tells the tensors from others of the same names: the digest of all, if the file has digests, and otherwise each
    /// one's name, shape, dtype and first bytes.
    pub(super) fn traits(&self) -> Result<Vec<Vec<u8>>> {
        if let Some(digests) = &self.digests {
            return Ok(vec![digests.header.to_le_bytes().to_vec()]);
        }
        let starts: Vec<u64> = self.entries.values().map(|entry| entry.at).sorted_unstable().collect();
        let of_tensor = |(name, Entry { dtype, shape, at }): (&String, &Entry)| {
            let mut first = [0; SAMPLE];
            // What follows a small tensor is none of it.
            let end = starts.get(starts.partition_point(|start| start <= at)).unwrap_or(&self.data.end);
            let count = if shape.contains(&0) { 0 } else { (end - at).min(SAMPLE as u64) as usize };
            self.fill(*at, &mut first[..count])?;
            Ok([format!("{name}\n{dtype}{shape:?}").as_bytes(), &first].concat())
        };
        self.entries.iter().map(of_tensor).collect()
    }

    /// Fills `bytes` with the bytes at offset `at`; returns how many bytes were read for that.
    ///
    /// Where the file has digests, whole blocks are read and compared with them. The caller has the `block` that was read last, so that
    /// ranks that read one file do not take it from each other.
    pub(super) fn read_at(&self, at: u64, bytes: &mut [u8], block: &mut Option<DigestBlock>) -> Result<u64> {
        let Some(digests) = self.digests.as_ref().filter(|_| !bytes.is_empty()) else {
            return self.fill(at, bytes).map(|()| bytes.len() as u64);
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
                self.fill(start, &mut here[..len])?;
                self.compare(digests, nth, start, &here[..len])?;
                read += len as u64;
            } else {
                let held = match block.take().filter(|(held, _)| *held == nth).or_else(|| self.last(nth)) {
                    Some(held) => held,
                    None => {
                        let mut whole = vec![0; len];
                        self.fill(start, &mut whole)?;
                        self.compare(digests, nth, start, &whole)?;
                        read += len as u64;
                        let whole = (nth, Arc::new(whole));
                        *self.last.lock().unwrap_or_else(PoisonError::into_inner) = Some(whole.clone());
                        whole
                    }
                };
                here[..count].copy_from_slice(&held.1[skipped..skipped + count]);
                *block = Some(held);
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
            self.read_at(start, &mut bytes[..len], &mut None)?;
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

    fn last(&self, nth: usize) -> Option<DigestBlock> {
        self.last.lock().unwrap_or_else(PoisonError::into_inner).clone().filter(|(last, _)| *last == nth)
    }

    fn fill(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        let n = bytes.len();
        read_exact_at(&self.file, at, bytes)
            .map_err(|error| Error::file(&self.path, format!("{n} bytes at {at} cannot be read ({error})")))
    }
}

#[cfg(unix)]
fn read_exact_at(file: &File, at: u64, bytes: &mut [u8]) -> io::Result<()> {
    std::os::unix::fs::FileExt::read_exact_at(file, bytes, at)
}

/// Where a read has no place of its own, threads take turns.
#[cfg(not(unix))]
fn read_exact_at(mut file: &File, at: u64, bytes: &mut [u8]) -> io::Result<()> {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
    file.seek(io::SeekFrom::Start(at)).and_then(|_| file.read_exact(bytes))
}
