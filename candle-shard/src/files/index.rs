//! Index files, which say which file holds which tensor, or which block of it: their only reader and writer.
//!
//! | file | holds | format version |
//! |---|---|---|
//! | `checkpoint.json` | shape, dtype and blocks of each tensor: [`Blocks`] | `format`, checked here |
//! | `model.safetensors.index.json`, by Hugging Face | the file of each tensor | none |
use super::regular;
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::Path;

/// The name of the index file in a checkpoint's folder.
pub(super) const INDEX: &str = "checkpoint.json";

/// The format that this version writes, and the newest one that it reads. A change that older versions would misread
/// must raise it; a field that they may ignore must not.
const FORMAT: u32 = 1;

/// The contents of an index file.
pub(super) enum Index {
    /// The index of a checkpoint.
    Blocks(Blocks),
    /// The index of Hugging Face: the file of each tensor, which holds all of it.
    Whole(BTreeMap<String, String>),
}

/// The tensors of a checkpoint by name.
pub(super) type Blocks = BTreeMap<String, Indexed>;

/// One tensor: global shape, dtype as named in safetensors files, and its blocks.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Indexed {
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
struct Fields {
    /// Checkpoints without this field are of format 1.
    format: Option<Value>,
    tensors: Option<Value>,
    weight_map: Option<Value>,
}

impl Index {
    /// Reads an index file of either kind.
    ///
    /// # Errors
    /// If it cannot be read, is no index, or a newer version wrote it.
    pub(super) fn read(path: &Path) -> Result<Self> {
        let failed = |error: &dyn std::fmt::Display| Error::file(path, format!("cannot be read as an index ({error})"));
        let text = regular::read(path, regular::INDEX).map_err(|error| failed(&error))?;
        let fields: Fields = serde_json::from_slice(&text).map_err(|error| failed(&error))?;
        match fields {
            Fields { weight_map: Some(files), tensors: None, .. } => {
                Ok(Self::Whole(serde_json::from_value(files).map_err(|error| failed(&error))?))
            }
            Fields { format, tensors, .. } => {
                let format = format.unwrap_or_else(|| 1.into());
                if !format.as_u64().is_some_and(|format| (1..=u64::from(FORMAT)).contains(&format)) {
                    let problem = format!("has format {format}, and this version reads 1 to {FORMAT}");
                    return Err(Error::file(path, format!("{problem}; update candle-shard")));
                }
                let tensors = tensors.ok_or_else(|| failed(&"it has neither tensors nor a weight_map"))?;
                Ok(Self::Blocks(serde_json::from_value(tensors).map_err(|error| failed(&error))?))
            }
        }
    }

    /// Returns the names of the files, some of them several times.
    pub(super) fn into_files(self) -> Vec<String> {
        match self {
            Self::Blocks(tensors) => {
                tensors.into_values().flat_map(|tensor| tensor.pieces).map(|piece| piece.file).collect()
            }
            Self::Whole(files) => files.into_values().collect(),
        }
    }
}

/// Returns the text of an index of blocks, in the newest format.
pub(super) fn text_of(tensors: &Blocks) -> serde_json::Result<Vec<u8>> {
    #[derive(Serialize)]
    struct Text<'a> {
        format: u32,
        tensors: &'a Blocks,
    }
    serde_json::to_vec_pretty(&Text { format: FORMAT, tensors })
}
