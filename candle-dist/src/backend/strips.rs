//! Copies of rows of any size. candle's kernel counts elements, strides and places in 32 bits, and would leave out or misplace the rest.
use crate::Result;
use candle_core::backend::BackendStorage;
use smallvec::{SmallVec, smallvec};

/// The most elements from the first to the last of a copy, in either buffer.
const MOST: usize = u32::MAX as usize;

/// A copy of `rows` runs of `len` elements, with the start of the first run and the distance of the runs in both buffers.
#[derive(Debug, Clone, Copy, PartialEq)]
struct RowCopy {
    rows: usize,
    len: usize,
    from: (usize, usize),
    to: (usize, usize),
}

/// Copies `rows` runs of `len` elements. Each place is the start of the first run, and the distance of the runs.
pub(super) fn copy_rows<S: BackendStorage>(
    source: &S,
    to: &mut S,
    (rows, len): (usize, usize),
    from_place: (usize, usize),
    to_place: (usize, usize),
) -> Result<()> {
    for RowCopy { rows, len, from, to: at } in
        (RowCopy { rows, len, from: from_place, to: to_place }).within(MOST)
    {
        source.copy2d(to, rows, len, from.1, at.1, from.0, at.0)?;
    }
    Ok(())
}

impl RowCopy {
    /// Returns copies that reach over at most so many elements of each buffer, and copy the same together.
    fn within(self, most: usize) -> SmallVec<[Self; 1]> {
        let Self { rows, len, mut from, mut to } = self;
        if rows == 0 || len == 0 {
            return SmallVec::new();
        }
        if rows == 1 {
            // A run has no distance to another one.
            (from.1, to.1) = (len, len);
        }
        // The runs that one copy reaches: all but the last of them with the distance to the next one.
        let step = from.1.max(to.1).max(len);
        let reached = most.checked_sub(len).map_or(0, |rest| rest / step + 1);
        if rows <= reached {
            return smallvec![Self { rows, len, from, to }];
        }
        // Runs that are too long are cut, and those that are too far from each other are copied one by one.
        let (height, width) = (reached.max(1), len.min(most));
        let pieces = (0..rows).step_by(height).flat_map(|row| {
            (0..len).step_by(width).map(move |start| {
                let (rows, len) = (height.min(rows - row), width.min(len - start));
                let place = |(first, step): (usize, usize)| {
                    (first + row * step + start, if rows == 1 { len } else { step })
                };
                Self { rows, len, from: place(from), to: place(to) }
            })
        });
        pieces.collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use candle_core::CpuStorage;
    use proptest::prelude::*;

    /// The elements from the first to the last of a copy, in the buffer where they are farther apart.
    fn reach(copy: &RowCopy) -> usize {
        (copy.rows - 1) * copy.from.1.max(copy.to.1) + copy.len
    }

    proptest! {
        #[test]
        fn strips_together_are_the_whole(
            most in 1usize..40, rows in 0usize..6, len in 0usize..6, gaps in (0usize..30, 0usize..30),
            starts in (0usize..3, 0usize..3),
        ) {
            let (from, to) = ((starts.0, len + gaps.0), (starts.1, len + gaps.1));
            let room = |place: (usize, usize)| place.0 + rows * place.1;
            let source = CpuStorage::U32((0..room(from) as u32).collect());
            let copied = |copies: &[RowCopy]| {
                let mut made = CpuStorage::U32(vec![u32::MAX; room(to)]);
                for RowCopy { rows, len, from, to } in copies {
                    source.copy2d(&mut made, *rows, *len, from.1, to.1, from.0, to.0).unwrap();
                }
                made.as_slice::<u32>().unwrap().to_vec()
            };
            let whole = RowCopy { rows, len, from, to };
            let strips = whole.within(most);
            prop_assert!(strips.iter().all(|it| reach(it) <= most), "{strips:?}");
            prop_assert_eq!(copied(&strips), copied(&[whole]));
        }
    }

    #[test]
    fn copies_of_more_than_32_bits_are_cut_and_others_are_not() {
        let copy = |rows, len, step| RowCopy { rows, len, from: (7, step), to: (0, len) };
        let small = copy(1 << 14, 1 << 17, 1 << 18);
        assert_eq!(small.within(MOST)[..], [small]);
        // Logits of 16k tokens and 256k words on two ranks. Logits of 32k tokens on eight ranks: each has less than 2^32 of them, but its
        // last rows are farther behind the first one.
        for big in [
            copy(1 << 14, 1 << 18, 1 << 19),
            copy(1 << 15, 1 << 15, 1 << 18),
            copy(3, 1 << 33, 1 << 34),
            copy(5, 8, 1 << 33),
        ] {
            let strips = big.within(MOST);
            assert!(strips.len() > 1 && strips.iter().all(|it| reach(it) <= MOST), "{strips:?}");
            assert_eq!(strips.iter().map(|it| it.rows * it.len).sum::<usize>(), big.rows * big.len);
        }
    }
}
