//! The index of a checkpoint: which file contains which block of which tensor.
use crate::files::weights::name_of;
use crate::layout::{Block, Spec};
use crate::{Error, Result};
use candle_core::DType;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::Path;

/// The name of the index file in a checkpoint's folder.
pub(crate) const INDEX: &str = "checkpoint.json";

/// The format that this version writes, and the newest one that it reads. A change that older versions would misread
/// must raise it; a field that they may ignore must not.
const FORMAT: u32 = 1;

/// The tensors by name.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Index {
    /// Checkpoints without this field are of format 1.
    #[serde(default = "first_format")]
    format: u32,
    pub(crate) tensors: BTreeMap<String, Indexed>,
}

/// One tensor: global shape, dtype as named in safetensors files, and its blocks.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Indexed {
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: String,
    pub(crate) pieces: Vec<IndexedPiece>,
}

/// A block: it begins at the global index `start` and lies in `file` under the tensor's name.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct IndexedPiece {
    pub(crate) file: String,
    pub(crate) start: Vec<usize>,
    pub(crate) shape: Vec<usize>,
}

/// A tensor to save: its entry in the index, and which rank writes which block.
pub(crate) struct Saved<'a> {
    pub(crate) name: &'a str,
    pub(crate) shape: &'a [usize],
    pub(crate) dtype: DType,
    pub(crate) pieces: Vec<Written>,
}

/// A block that a rank of the group writes: the `part`-th of its blocks of the tensor.
pub(crate) struct Written {
    pub(crate) rank: usize,
    pub(crate) part: usize,
    pub(crate) block: Block,
}

/// Returns the name of the file with the `part`-th block of each tensor that a rank of the group writes.
pub(super) fn file_of(rank: usize, part: usize, generation: u64) -> String {
    let part = if part == 0 { String::new() } else { format!("-{part}") };
    let generation = if generation == 0 { String::new() } else { format!(".{generation}") };
    format!("rank-{rank:05}{part}{generation}.safetensors")
}

/// Returns the number of the save, counted from 0, that wrote a file with this name; `None` for other names.
pub(super) fn generation_of(name: &str) -> Option<u64> {
    let name = name.strip_prefix("rank-")?.strip_suffix(".safetensors")?;
    let (of, generation) = name.split_once('.').unwrap_or((name, "0"));
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    of.split('-').all(is_number).then_some(())?;
    generation.parse().ok()
}

impl<'a> Saved<'a> {
    /// Describes the `nth` tensor of a checkpoint in this layout.
    ///
    /// If several ranks hold the same block, one of them writes it, a different one from tensor to tensor. Empty blocks
    /// are not written.
    pub(super) fn of_spec(nth: usize, name: &'a str, spec: &'a Spec) -> Self {
        let mut holders: BTreeMap<Vec<usize>, Vec<Written>> = BTreeMap::new();
        for (rank, coordinate) in spec.mesh().coordinates().enumerate() {
            let block = spec.block_at(&coordinate);
            if block.iter().all(|range| !range.is_empty()) {
                // Blocks with the same start are equal.
                let start = block.iter().map(|range| range.start).collect();
                holders.entry(start).or_default().push(Written { rank, part: 0, block });
            }
        }
        let chosen = |mut held: Vec<Written>| held.swap_remove(nth % held.len());
        Self { name, shape: spec.dims(), dtype: spec.dtype(), pieces: holders.into_values().map(chosen).collect() }
    }
}

fn first_format() -> u32 {
    1
}

impl Index {
    /// Returns an error if a newer version wrote the index file `path`.
    pub(crate) fn check_format(&self, path: &Path) -> Result<()> {
        if !(1..=FORMAT).contains(&self.format) {
            let problem =
                format!("has format {}, and this version reads 1 to {FORMAT}; update candle-shard", self.format);
            return Err(Error::file(path, problem));
        }
        Ok(())
    }

    pub(super) fn of(tensors: &[Saved<'_>], generation: u64) -> Self {
        let piece = |written: &Written| {
            let (start, shape) = written.block.iter().map(|range| (range.start, range.len())).unzip();
            IndexedPiece { file: file_of(written.rank, written.part, generation), start, shape }
        };
        let indexed = |saved: &Saved<'_>| {
            let dtype = name_of(saved.dtype).unwrap_or_default().into();
            let pieces = saved.pieces.iter().map(piece).collect();
            (saved.name.to_string(), Indexed { shape: saved.shape.to_vec(), dtype, pieces })
        };
        Self { format: FORMAT, tensors: tensors.iter().map(indexed).collect() }
    }
}
