//! One file of tensors: its header, and reads at an offset.
use super::dtypes;
use super::entry::{Entry, elements};
use super::gguf::{self, Metadata, types};
use crate::files::regular;
use crate::{Error, Result};
use serde::Deserialize;
use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::{Path, PathBuf};
use std::sync::{Mutex, PoisonError};

/// The longest header that is accepted, as in other readers of the format.
const LONGEST_HEADER: u64 = 100_000_000;

/// An open file and the contents of its header.
pub(super) struct WeightFile {
    pub(super) path: PathBuf,
    pub(super) entries: BTreeMap<String, Entry>,
    /// The metadata of a GGUF file.
    pub(super) metadata: Option<Metadata>,
    file: Mutex<File>,
}

/// A tensor as the header describes it; offsets count from the end of the header.
#[derive(Deserialize)]
struct Described {
    dtype: String,
    shape: Vec<usize>,
    data_offsets: (u64, u64),
}

impl WeightFile {
    /// Reads the header and checks all of it against the file's length, so that a truncated file is refused here.
    pub(super) fn open(path: &Path) -> Result<Self> {
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
        let described: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(&header).map_err(|error| wrong(format!("has a damaged header ({error})")))?;
        let mut entries = BTreeMap::new();
        for (name, value) in described.into_iter().filter(|(name, _)| name != "__metadata__") {
            let described = Described::deserialize(value)
                .map_err(|error| wrong(format!("describes {name:?} in an unknown form ({error})")))?;
            let entry = described.check(header_length + 8, length).map_err(|why| wrong(format!("{name:?} {why}")))?;
            entries.insert(name, entry);
        }
        Ok(Self { path: path.into(), entries, metadata: None, file: Mutex::new(file) })
    }

    fn open_gguf(path: &Path, file: File, length: u64) -> Result<Self> {
        let header = file.try_clone().map_err(|error| error.to_string()).and_then(|file| gguf::read(file, length));
        let (metadata, entries) =
            header.map_err(|why| Error::file(path, format!("{why}; is it a complete GGUF file?")))?;
        Ok(Self { path: path.into(), entries, metadata: Some(metadata), file: Mutex::new(file) })
    }

    /// Fills `bytes` with the bytes at offset `at`.
    pub(super) fn read_at(&self, at: u64, bytes: &mut [u8]) -> Result<()> {
        let mut file = self.file.lock().unwrap_or_else(PoisonError::into_inner);
        let read = file.seek(SeekFrom::Start(at)).and_then(|_| file.read_exact(bytes));
        let n = bytes.len();
        read.map_err(|error| Error::file(&self.path, format!("{n} bytes at {at} cannot be read ({error})")))
    }
}

impl Described {
    /// Returns the entry, if its bytes are inside a file of this length and match shape and dtype.
    fn check(self, data_at: u64, length: u64) -> Result<Entry, String> {
        let (start, end) = self.data_offsets;
        if start > end || end > length - data_at {
            let has = length - data_at;
            return Err(format!("lies at bytes {start} to {end} of the data, which has only {has}"));
        }
        if types::blocks_named(&self.dtype).is_some() {
            return Err(format!("is {}, blocks that only GGUF files have", self.dtype));
        }
        // The size of an unknown dtype is unknown too; it matters only when the tensor is read.
        if let Some(dtype) = dtypes::named(&self.dtype) {
            let bytes = elements(&self.shape).and_then(|n| n.checked_mul(dtype.size_in_bytes()));
            if bytes != Some((end - start) as usize) {
                let (dtype, shape, has) = (&self.dtype, &self.shape, end - start);
                return Err(format!("is {dtype}{shape:?} and has {has} bytes"));
            }
        }
        Ok(Entry { dtype: self.dtype, shape: self.shape, at: data_at + start })
    }
}
