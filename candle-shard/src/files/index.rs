//! Index files, which say which file holds which tensor, or which block of it: their only reader and writer.
//!
//! | file | holds | format version |
//! |---|---|---|
//! | `checkpoint.json` | shape, dtype and blocks of each tensor, and what tells its files from others: [`CheckpointIndex`] | `format`, checked here |
//! | `model.safetensors.index.json`, by Hugging Face | the file of each tensor | none |
use super::digests::{FileStamp, hex};
use super::regular;
use crate::{Error, Result};
use candle_dist::bits::digest_bytes;
use serde::de::{Error as _, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt;
use std::io::ErrorKind;
use std::marker::PhantomData;
use std::path::Path;

/// The name of the index file in a checkpoint's folder.
pub(super) const INDEX: &str = "checkpoint.json";

/// The format that this version writes, and the newest one that it reads. A change that older versions would misread
/// must raise it; a field that they may ignore must not.
const FORMAT: u32 = 1;

/// The contents of an index file.
pub(super) enum IndexFile {
    /// The index of a checkpoint.
    Blocks(CheckpointIndex),
    /// The index of Hugging Face: the file of each tensor, which holds all of it.
    Whole(BTreeMap<String, String>),
}

/// The index of a checkpoint.
#[derive(Debug, Default, Deserialize)]
pub(super) struct CheckpointIndex {
    /// The tensors by name.
    #[serde(deserialize_with = "once")]
    pub(super) tensors: BTreeMap<String, TensorIndex>,
    /// The files by name; empty in checkpoints of versions without digests.
    #[serde(default, deserialize_with = "once")]
    pub(super) files: BTreeMap<String, FileStamp>,
    /// Of tensors and files.
    #[serde(default)]
    digest: Option<FileDigest>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
struct FileDigest(#[serde(with = "hex")] u64);

/// One tensor: global shape, dtype as named in safetensors files, and its blocks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct TensorIndex {
    pub(super) shape: Vec<usize>,
    pub(super) dtype: String,
    pub(super) pieces: Vec<IndexedPiece>,
}

/// A block: it begins at the global index `start` and lies in `file` under the tensor's name.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct IndexedPiece {
    pub(super) file: String,
    pub(super) start: Vec<usize>,
    pub(super) shape: Vec<usize>,
}

/// The fields of both kinds of index, read before the format is known.
#[derive(Deserialize)]
struct IndexFields {
    /// Checkpoints without this field are of format 1.
    format: Option<Value>,
    tensors: Option<IgnoredAny>,
    weight_map: Option<IgnoredAny>,
}

#[derive(Deserialize)]
struct ModelIndex {
    #[serde(deserialize_with = "once")]
    weight_map: BTreeMap<String, String>,
}

impl IndexFile {
    /// Reads the text of an index file of either kind, which lies at `path`.
    ///
    /// # Errors
    /// If it is no index, or a newer version wrote it.
    pub(super) fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        let fields: IndexFields = serde_json::from_slice(text).map_err(|error| failed(path, &error))?;
        if fields.weight_map.is_some() && fields.tensors.is_none() {
            let ModelIndex { weight_map } =
                serde_json::from_slice(text).map_err(|error| failed(path, &error))?;
            return Ok(Self::Whole(weight_map));
        }
        let format = fields.format.unwrap_or_else(|| 1.into());
        if !format.as_u64().is_some_and(|format| (1..=u64::from(FORMAT)).contains(&format)) {
            let problem = format!("has format {format}, and this version reads 1 to {FORMAT}");
            return Err(Error::file(path, format!("{problem}; update candle-shard")));
        }
        if fields.tensors.is_none() {
            return Err(failed(path, &"it has neither tensors nor a weight_map"));
        }
        Ok(Self::Blocks(serde_json::from_slice(text).map_err(|error| failed(path, &error))?))
    }
}

impl CheckpointIndex {
    /// Creates the index of these tensors in these files.
    pub(super) fn new(tensors: BTreeMap<String, TensorIndex>, files: BTreeMap<String, FileStamp>) -> Self {
        let mut made = Self { tensors, files, digest: None };
        made.digest = made.digest();
        made
    }

    /// Returns the index in a folder; `None` if there is none.
    ///
    /// # Errors
    /// If it cannot be read, or is not one that this version has written or can replace.
    pub(super) fn to_replace(folder: &Path) -> Result<Option<Self>> {
        let path = folder.join(INDEX);
        let keep = |why: &dyn fmt::Display| {
            Error::file(&path, format!("is not replaced, because {why}; move it, or save to another folder"))
        };
        let text = match std::fs::symlink_metadata(&path) {
            Err(error) if error.kind() == ErrorKind::NotFound => return Ok(None),
            Ok(about) if !about.is_file() => return Err(keep(&"it is not a regular file")),
            _ => read(&path)?,
        };
        let fields: BTreeMap<String, IgnoredAny> =
            serde_json::from_slice(&text).map_err(|error| keep(&format_args!("it is no index ({error})")))?;
        match IndexFile::parse(&path, &text).map_err(|error| match error {
            Error::File { reason, .. } => keep(&format_args!("it {reason}")),
            error => error,
        })? {
            IndexFile::Whole(_) => Err(keep(&"another program wrote it")),
            IndexFile::Blocks(_)
                if fields
                    .keys()
                    .any(|field| !["format", "tensors", "files", "digest"].contains(&&**field)) =>
            {
                Err(keep(&"it has fields that this program does not write"))
            }
            IndexFile::Blocks(index) if index.tensors.is_empty() && !fields.contains_key("format") => {
                Err(keep(&"it has no tensors"))
            }
            IndexFile::Blocks(index) => Ok(Some(index)),
        }
    }

    /// Returns the names of the tensors.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// Returns the names of the files.
    pub(super) fn file_names(&self) -> impl Iterator<Item = &str> {
        self.tensors.values().flat_map(|tensor| &tensor.pieces).map(|piece| &*piece.file)
    }

    /// Returns whether the index is as it was written; also if an older version wrote it, which knew no digests.
    pub(super) fn is_intact(&self) -> bool {
        self.digest.is_none() || self.digest == self.digest()
    }

    fn digest(&self) -> Option<FileDigest> {
        Some(FileDigest(digest_bytes(&serde_json::to_vec(&(&self.tensors, &self.files)).ok()?)))
    }

    /// Returns the text of the index, in the newest format.
    pub(super) fn text(&self) -> serde_json::Result<Vec<u8>> {
        #[derive(Serialize)]
        struct Text<'a> {
            format: u32,
            tensors: &'a BTreeMap<String, TensorIndex>,
            files: &'a BTreeMap<String, FileStamp>,
            digest: Option<FileDigest>,
        }
        let Self { tensors, files, digest } = self;
        serde_json::to_vec_pretty(&Text { format: FORMAT, tensors, files, digest: *digest })
    }
}

/// Reads the text of an index file.
///
/// # Errors
/// If it cannot be read.
pub(super) fn read(path: &Path) -> Result<Vec<u8>> {
    regular::read(path, regular::INDEX).map_err(|error| failed(path, &error))
}

fn failed(path: &Path, error: &dyn fmt::Display) -> Error {
    Error::file(path, format!("cannot be read as an index ({error})"))
}

/// Reads a map in which no name comes twice.
fn once<'de, D: Deserializer<'de>, V: Deserialize<'de>>(
    deserializer: D,
) -> Result<BTreeMap<String, V>, D::Error> {
    struct Once<V>(PhantomData<V>);
    impl<'de, V: Deserialize<'de>> Visitor<'de> for Once<V> {
        type Value = BTreeMap<String, V>;

        fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str("a map")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Self::Value, A::Error> {
            let mut read = BTreeMap::new();
            while let Some((name, value)) = map.next_entry::<String, V>()? {
                if read.contains_key(&name) {
                    return Err(A::Error::custom(format!("{name:?} comes twice")));
                }
                read.insert(name, value);
            }
            Ok(read)
        }
    }
    deserializer.deserialize_map(Once(PhantomData))
}
