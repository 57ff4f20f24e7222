//! The runs of bytes in which a stored block overlaps a wanted block.
use std::ops::Range;

/// Bytes that are consecutive both in the file and in the new tensor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct ByteRun {
    /// Their offset in the stored block.
    pub(super) from: usize,
    /// Their offset in the wanted block.
    pub(super) to: usize,
    pub(super) len: usize,
}

/// The runs in which a stored and a wanted block overlap, in the order of the file.
pub(super) struct ByteRuns {
    /// For each dim that separates runs: the size of the overlap, and the strides in bytes of both blocks.
    outer: Vec<(usize, usize, usize)>,
    first: ByteRun,
    next: usize,
    count: usize,
}

impl ByteRuns {
    /// Both blocks are ranges of global indices, row-major, with elements of `size` bytes.
    pub(super) fn new(stored: &[Range<usize>], wanted: &[Range<usize>], size: usize) -> Self {
        let mut first = ByteRun { from: 0, to: 0, len: size };
        // Dims beside an empty one may be as large as a header claims, so their products are not computed.
        if stored.iter().zip(wanted).any(|(stored, wanted)| overlap(stored, wanted) == 0) {
            return Self { outer: Vec::new(), first, next: 0, count: 0 };
        }
        let (mut outer, mut count, mut together) = (Vec::new(), 1, true);
        let (mut from_step, mut to_step) = (size, size);
        for (stored, wanted) in stored.iter().zip(wanted).rev() {
            let start = stored.start.max(wanted.start);
            let len = overlap(stored, wanted);
            first.from += (start - stored.start) * from_step;
            first.to += (start - wanted.start) * to_step;
            match together {
                true => first.len *= len,
                false => {
                    count *= len;
                    outer.push((len, from_step, to_step));
                }
            }
            // Indices of the next outer dim are contiguous only if this dim is whole in both blocks.
            together &= len == stored.len() && len == wanted.len();
            from_step *= stored.len();
            to_step *= wanted.len();
        }
        Self { outer, first, next: 0, count }
    }
}

fn overlap(a: &Range<usize>, b: &Range<usize>) -> usize {
    a.end.min(b.end).saturating_sub(a.start.max(b.start))
}

impl Iterator for ByteRuns {
    type Item = ByteRun;

    fn next(&mut self) -> Option<ByteRun> {
        if self.next == self.count {
            return None;
        }
        let (mut run, mut index) = (self.first, self.next);
        for &(len, from_step, to_step) in &self.outer {
            run.from += index % len * from_step;
            run.to += index % len * to_step;
            index /= len;
        }
        self.next += 1;
        Some(run)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use itertools::Itertools;
    use proptest::prelude::*;

    fn run(from: usize, to: usize, len: usize) -> ByteRun {
        ByteRun { from, to, len }
    }

    #[test]
    fn rows_are_one_run_and_columns_one_a_row() {
        let rows: Vec<_> = ByteRuns::new(&[0..4, 0..6], &[1..3, 0..6], 4).collect();
        assert_eq!(rows, [run(24, 0, 48)]);
        let columns: Vec<_> = ByteRuns::new(&[0..3, 0..6], &[0..3, 4..6], 4).collect();
        assert_eq!(columns, [run(16, 0, 8), run(40, 8, 8), run(64, 16, 8)]);
        assert_eq!(ByteRuns::new(&[], &[], 8).collect::<Vec<_>>(), [run(0, 0, 8)]);
        assert_eq!(ByteRuns::new(&[0..2, 0..3], &[2..4, 0..3], 4).count(), 0);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(256) })]
        #[test]
        fn every_byte_of_the_overlap_goes_to_its_place_once(
            bounds in prop::collection::vec((0usize..4, 0usize..5, 0usize..4, 0usize..5), 0..4),
        ) {
            let stored: Vec<_> = bounds.iter().map(|b| b.0..b.0 + b.1).collect();
            let wanted: Vec<_> = bounds.iter().map(|b| b.2..b.2 + b.3).collect();
            let place = |block: &[Range<usize>], at: &[usize]| {
                block.iter().zip(at).fold(0, |n, (range, i)| n * range.len() + i - range.start)
            };
            let mut want = Vec::new();
            let both = stored.iter().zip(&wanted).map(|(s, w)| s.start.max(w.start)..s.end.min(w.end));
            let mut places: Vec<Vec<usize>> = both.multi_cartesian_product().collect();
            if bounds.is_empty() {
                places = vec![vec![]];
            }
            for at in places {
                want.push((place(&stored, &at) * 2, place(&wanted, &at) * 2));
                want.push((place(&stored, &at) * 2 + 1, place(&wanted, &at) * 2 + 1));
            }
            let got: Vec<_> =
                ByteRuns::new(&stored, &wanted, 2).flat_map(|r| (0..r.len).map(move |i| (r.from + i, r.to + i))).collect();
            prop_assert_eq!(got, want);
        }
    }
}
