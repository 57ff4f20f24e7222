//! Pictures of which rank holds which block.
mod svg;
mod text;

pub use svg::visualize_sharding_svg;
pub use text::visualize_sharding;

use crate::layout::Spec;
use crate::{Error, Result};
use itertools::Itertools;
use std::collections::BTreeMap;

/// Start and end of a range of global indices.
type Bounds = (usize, usize);

/// The ranks that hold each block of a tensor with up to three dims: slices of rows of columns.
struct Grid {
    slices: Vec<Bounds>,
    rows: Vec<Bounds>,
    columns: Vec<Bounds>,
    /// The ranks of the mesh that hold each block: slice, row, column.
    holders: BTreeMap<[Bounds; 3], Vec<usize>>,
    /// The ranks with empty shards.
    empty: Vec<usize>,
}

impl Grid {
    /// Missing dims become a single range 0..1.
    fn new(op: &'static str, spec: &Spec) -> Result<Self> {
        if !matches!(spec.dims().len(), 1..=3) {
            return Error::op(op, format!("{spec} has {} dims; expected 1, 2 or 3", spec.dims().len()));
        }
        let (mut holders, mut empty): (BTreeMap<_, Vec<usize>>, _) = (BTreeMap::new(), Vec::new());
        for (rank, coordinate) in spec.mesh().coordinates().enumerate() {
            let block = spec.block_at(&coordinate);
            let mut place = [(0, 1); 3];
            for (bounds, range) in place.iter_mut().rev().zip(block.iter().rev()) {
                *bounds = (range.start, range.end);
            }
            match place.iter().any(|(start, end)| start == end) {
                true => empty.push(rank),
                false => holders.entry(place).or_default().push(rank),
            }
        }
        let along = |dim: usize| holders.keys().map(|place| place[dim]).sorted().dedup().collect();
        Ok(Self { slices: along(0), rows: along(1), columns: along(2), holders, empty })
    }

    /// Returns the ranks that hold a block.
    fn held(&self, slice: Bounds, row: Bounds, column: Bounds) -> &[usize] {
        self.holders.get(&[slice, row, column]).map_or(&[], Vec::as_slice)
    }
}

fn shown((start, end): Bounds) -> String {
    format!("{start}..{end}")
}

fn named(ranks: &[usize]) -> String {
    format!("rank{} {}", if ranks.len() > 1 { "s" } else { "" }, ranks.iter().join(", "))
}
