//! What a save writes: which rank puts which block of which tensor into which file.
use crate::files::index::{Blocks, Indexed, IndexedPiece};
use crate::files::weights::name_of;
use crate::layout::{Block, Spec};
use candle_core::DType;
use std::collections::BTreeMap;

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

/// Returns the index of these tensors.
pub(super) fn index_of(tensors: &[Saved<'_>], generation: u64) -> Blocks {
    let piece = |written: &Written| {
        let (start, shape) = written.block.iter().map(|range| (range.start, range.len())).unzip();
        IndexedPiece { file: file_of(written.rank, written.part, generation), start, shape }
    };
    let indexed = |saved: &Saved<'_>| {
        let dtype = name_of(saved.dtype).unwrap_or_default().into();
        let pieces = saved.pieces.iter().map(piece).collect();
        (saved.name.to_string(), Indexed { shape: saved.shape.to_vec(), dtype, pieces })
    };
    tensors.iter().map(indexed).collect()
}
