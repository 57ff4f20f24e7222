//! What a save writes: which rank puts which block of which tensor into which file.
use crate::files::index::{INDEX, IndexedPiece, TensorIndex};
use crate::files::weights::name_of;
use crate::layout::{Block, Spec};
use candle_core::DType;
use std::collections::BTreeMap;

/// A tensor to save: its entry in the index, and which rank writes which block.
pub(crate) struct SaveEntry<'a> {
    pub(crate) name: &'a str,
    pub(crate) shape: &'a [usize],
    pub(crate) dtype: DType,
    pub(crate) pieces: Vec<BlockWriter>,
}

/// A block that a rank of the group writes: the `part`-th of its blocks of the tensor.
pub(crate) struct BlockWriter {
    pub(crate) rank: usize,
    pub(crate) part: usize,
    pub(crate) block: Block,
}

/// Returns the name of the file with the `part`-th block of each tensor that a rank of the group writes.
pub(super) fn file_of(rank: usize, part: usize, nonce: &str) -> String {
    let part = if part == 0 { String::new() } else { format!("-{part}") };
    format!("rank-{rank:05}{part}.{nonce}.safetensors")
}

/// Returns the name of the index of a save that is not complete.
pub(super) fn partial(nonce: &str) -> String {
    format!("{INDEX}.{nonce}.partial")
}

/// Returns whether a save creates files of such names, or one of an earlier version did, which counted saves.
pub(super) fn is_name(name: &str) -> bool {
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    let is_nonce = |text: &str| !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_hexdigit());
    let index = name.strip_prefix(INDEX).and_then(|name| name.strip_prefix('.')?.strip_suffix(".partial"));
    let data = name.strip_prefix("rank-").and_then(|name| name.strip_suffix(".safetensors"));
    let data = data.map(|name| name.split_once('.').unwrap_or((name, "0")));
    index.is_some_and(is_nonce)
        || data.is_some_and(|(of, nonce)| of.split('-').all(is_number) && is_nonce(nonce))
}

impl<'a> SaveEntry<'a> {
    /// Describes the `nth` tensor of a checkpoint in this layout.
    ///
    /// If several ranks hold the same block, one of them writes it, a different one from tensor to tensor. Empty blocks
    /// are not written.
    pub(super) fn of_spec(nth: usize, name: &'a str, spec: &'a Spec) -> Self {
        let mut holders: BTreeMap<Vec<usize>, Vec<BlockWriter>> = BTreeMap::new();
        for (rank, coordinate) in spec.mesh().coordinates().enumerate() {
            let block = spec.block_at(&coordinate);
            if block.iter().all(|range| !range.is_empty()) {
                // Blocks with the same start are equal.
                let start = block.iter().map(|range| range.start).collect();
                holders.entry(start).or_default().push(BlockWriter { rank, part: 0, block });
            }
        }
        let chosen = |mut held: Vec<BlockWriter>| held.swap_remove(nth % held.len());
        Self {
            name,
            shape: spec.dims(),
            dtype: spec.dtype(),
            pieces: holders.into_values().map(chosen).collect(),
        }
    }
}

/// Returns the entries of these tensors in the index of a save.
pub(super) fn index_of(tensors: &[SaveEntry<'_>], nonce: &str) -> BTreeMap<String, TensorIndex> {
    let piece = |written: &BlockWriter| {
        let (start, shape) = written.block.iter().map(|range| (range.start, range.len())).unzip();
        IndexedPiece { file: file_of(written.rank, written.part, nonce), start, shape }
    };
    let indexed = |saved: &SaveEntry<'_>| {
        let dtype = name_of(saved.dtype).unwrap_or_default().into();
        let pieces = saved.pieces.iter().map(piece).collect();
        (saved.name.to_string(), TensorIndex { shape: saved.shape.to_vec(), dtype, pieces })
    };
    tensors.iter().map(indexed).collect()
}
