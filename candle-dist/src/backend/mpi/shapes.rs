//! Where the pieces of a tensor along one dim lie in its memory.
use super::plan::{Buffer, Place};

/// Runs of elements at equal distances.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rows {
    pub(super) buffer: Buffer,
    pub(super) start: usize,
    /// The elements of a run.
    pub(super) run: usize,
    /// The runs.
    pub(super) count: usize,
    /// From one run's beginning to the next one's.
    pub(super) stride: usize,
}

impl Rows {
    /// The one run of a place.
    pub(super) fn of(place: Place) -> Self {
        let Place { buffer, start, len } = place;
        Self { buffer, start, run: len, count: 1, stride: len }
    }
}

/// A tensor's pieces along one dim, one for each member.
#[derive(Debug)]
pub(super) struct Cut {
    /// The runs that each piece has: the product of the dims before the cut one.
    rows: usize,
    /// By piece: where it begins in a row.
    starts: Vec<usize>,
    /// By piece: its elements.
    lens: Vec<usize>,
    /// The elements of a row of the whole.
    row: usize,
}

/// The elements behind one index of `dim`.
pub(super) fn inner(shape: &[usize], dim: usize) -> usize {
    shape[dim + 1..].iter().product()
}

/// The pieces of a tensor of `shape` that is cut along `dim` into `sizes`.
pub(super) fn cut(shape: &[usize], dim: usize, sizes: &[usize]) -> Cut {
    Cut::new(shape[..dim].iter().product(), sizes.iter().map(|size| size * inner(shape, dim)))
}

/// The tensors of `shape`, but for `sizes` along `dim`, that are joined there: the pieces of the joined one.
pub(super) fn join(shape: &[usize], dim: usize, sizes: &[usize]) -> Cut {
    cut(shape, dim, sizes)
}

impl Cut {
    /// Pieces that have `rows` runs each, of these lengths.
    fn new(rows: usize, runs: impl Iterator<Item = usize>) -> Self {
        let (mut starts, mut lens, mut row) = (Vec::new(), Vec::new(), 0);
        for run in runs {
            starts.push(row);
            lens.push(rows * run);
            row += run;
        }
        Self { rows, starts, lens, row }
    }

    /// Pieces of these lengths, one behind the other.
    pub(super) fn flat(lens: impl Iterator<Item = usize>) -> Self {
        Self::new(1, lens)
    }

    /// The elements of each piece.
    pub(super) fn lens(&self) -> &[usize] {
        &self.lens
    }

    /// Whether the pieces lie one behind the other.
    pub(super) fn is_flat(&self) -> bool {
        self.rows <= 1
    }

    /// Piece `i` within the whole, which lies in `buffer`.
    pub(super) fn rows(&self, i: usize, buffer: Buffer) -> Rows {
        let run = self.lens[i] / self.rows.max(1);
        Rows { buffer, start: self.starts[i], run, count: self.rows, stride: self.row }
    }

    /// Piece `i` by itself, in as many runs as it has within the whole.
    pub(super) fn packed(&self, i: usize, place: Place) -> Rows {
        let run = self.lens[i] / self.rows.max(1);
        Rows { buffer: place.buffer, start: place.start, run, count: self.rows, stride: run }
    }
}
