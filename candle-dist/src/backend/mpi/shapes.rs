//! Memory layout of the pieces of a tensor along one dim.
use super::plan::{ElementRun, PlanBuffer};
use crate::call::Cut;

/// Runs of elements at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct StridedRuns {
    pub(super) buffer: PlanBuffer,
    pub(super) start: usize,
    /// The number of elements per run.
    pub(super) run: usize,
    /// The number of runs.
    pub(super) count: usize,
    /// The distance between the starts of two runs.
    pub(super) stride: usize,
}

impl StridedRuns {
    /// Returns the one run of a place.
    pub(super) fn of(place: ElementRun) -> Self {
        let ElementRun { buffer, start, len } = place;
        Self { buffer, start, run: len, count: 1, stride: len }
    }
}

/// A tensor's pieces along one dim, one per member.
#[derive(Debug)]
pub(super) struct PieceLayout {
    /// The number of runs of each piece: the product of the dims before the cut one.
    rows: usize,
    /// The start of each piece in a row.
    starts: Vec<usize>,
    /// The number of elements of each piece.
    lens: Vec<usize>,
    /// The number of elements of a whole row.
    row: usize,
}

/// Returns the number of elements per index of `dim`.
pub(super) fn inner(shape: &[usize], dim: usize) -> usize {
    shape[dim + 1..].iter().product()
}

/// Returns the pieces of a tensor. `shape` is that of the whole, or that of one of its pieces.
pub(super) fn pieces(shape: &[usize], cut: &Cut) -> PieceLayout {
    let row = inner(shape, cut.dim);
    PieceLayout::new(shape[..cut.dim].iter().product(), cut.sizes.iter().map(|size| size * row))
}

impl PieceLayout {
    /// Creates pieces with `rows` runs each, of these lengths.
    fn new(rows: usize, runs: impl Iterator<Item = usize>) -> Self {
        let (mut starts, mut lens, mut row) = (Vec::new(), Vec::new(), 0);
        for run in runs {
            starts.push(row);
            lens.push(rows * run);
            row += run;
        }
        Self { rows, starts, lens, row }
    }

    /// Creates consecutive pieces of these lengths.
    pub(super) fn flat(lens: impl Iterator<Item = usize>) -> Self {
        Self::new(1, lens)
    }

    /// Returns the number of elements of each piece.
    pub(super) fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Returns whether the pieces are consecutive.
    pub(super) fn is_flat(&self) -> bool {
        self.rows <= 1
    }

    /// Returns piece `i` within the whole, which lies in `buffer`.
    pub(super) fn rows(&self, i: usize, buffer: PlanBuffer) -> StridedRuns {
        let run = self.lens[i] / self.rows.max(1);
        StridedRuns { buffer, start: self.starts[i], run, count: self.rows, stride: self.row }
    }

    /// Returns piece `i` by itself, in as many runs as it has within the whole.
    pub(super) fn packed(&self, i: usize, place: ElementRun) -> StridedRuns {
        let run = self.lens[i] / self.rows.max(1);
        StridedRuns { buffer: place.buffer, start: place.start, run, count: self.rows, stride: run }
    }
}
