//! Which file of a checkpoint holds which block of which tensor.
use super::Named;
use crate::spec::Spec;
use crate::weights::name_of;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The name of the index in a checkpoint's folder.
pub(crate) const INDEX: &str = "checkpoint.json";

/// The tensors by name.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Index {
    pub(crate) tensors: BTreeMap<String, Indexed>,
}

/// One tensor: global shape, dtype as safetensors files name it, and the blocks that make it.
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

/// The file that a rank of the mesh writes.
pub(super) fn file_of(rank: usize) -> String {
    format!("rank-{rank:05}.safetensors")
}

/// The ranks that write the `nth` tensor of a checkpoint: of those that hold the same block one, a different one from
/// tensor to tensor; none for blocks without elements.
pub(super) fn writers(nth: usize, spec: &Spec) -> Vec<usize> {
    let mut holders: BTreeMap<Vec<usize>, Vec<usize>> = BTreeMap::new();
    for (rank, coordinate) in spec.mesh().coordinates().enumerate() {
        let block = spec.block_at(&coordinate);
        if block.iter().all(|range| !range.is_empty()) {
            // Blocks that begin at one place are the same.
            holders.entry(block.iter().map(|range| range.start).collect()).or_default().push(rank);
        }
    }
    holders.into_values().map(|ranks| ranks[nth % ranks.len()]).collect()
}

impl Index {
    pub(super) fn of(tensors: &[Named<'_>]) -> Self {
        let indexed = |(nth, (name, spec)): (usize, &Named<'_>)| {
            let places: Vec<_> = spec.mesh().coordinates().collect();
            let piece = |rank: usize| {
                let block = spec.block_at(&places[rank]);
                let (start, shape) = block.iter().map(|range| (range.start, range.len())).unzip();
                IndexedPiece { file: file_of(rank), start, shape }
            };
            let pieces = writers(nth, spec).into_iter().map(piece).collect();
            let dtype = name_of(spec.dtype()).unwrap_or_default().into();
            (name.to_string(), Indexed { shape: spec.dims().to_vec(), dtype, pieces })
        };
        Self { tensors: tensors.iter().enumerate().map(indexed).collect() }
    }
}
