//! Rows of large tables, on their way to the cache before they are used.

/// Bytes of a cache line.
const LINE: usize = 64;

/// The lines that are under way at once: as many as a core can wait for, and few enough for its L1 cache.
const UNDER_WAY: usize = 64;

/// The most lines of a row that are asked for. The processor itself continues long rows.
const MOST: usize = 16;

/// A table whose rows are asked for some rows ahead of their use, so that the times of their accesses overlap.
///
/// A computation that reads a row waits for it; this does not.
#[derive(Clone, Copy)]
pub(super) struct Prefetch {
    base: *const u8,
    row_bytes: usize,
}

impl Prefetch {
    /// Creates the prefetch of a table of rows with `width` elements.
    pub(super) fn of<T>(table: &[T], width: usize) -> Self {
        Self { base: table.as_ptr().cast(), row_bytes: width * size_of::<T>() }
    }

    /// Calls `each` with the index of each of `count` entries, in order, and asks for the rows of later entries before.
    #[inline(always)]
    pub(super) fn along(
        tables: &[Self],
        count: usize,
        row_of: impl Fn(usize) -> usize,
        mut each: impl FnMut(usize),
    ) {
        let lines = |table: &Self| table.row_bytes.div_ceil(LINE).clamp(1, MOST);
        let ahead = (UNDER_WAY / tables.iter().map(lines).sum::<usize>().max(1)).max(1);
        let ask = |entry: usize| tables.iter().for_each(|table| table.ask(row_of(entry)));
        (0..ahead.min(count)).for_each(ask);
        for entry in 0..count {
            if entry + ahead < count {
                ask(entry + ahead);
            }
            each(entry);
        }
    }

    #[inline(always)]
    fn ask(&self, row: usize) {
        let start = self.base.wrapping_add(row.wrapping_mul(self.row_bytes));
        let first = start.wrapping_sub(start.addr() % LINE);
        let end = start.addr() + self.row_bytes.min(LINE * MOST);
        let mut line = first;
        while line.addr() < end {
            prefetch(line);
            line = line.wrapping_add(LINE);
        }
    }
}

#[inline(always)]
#[cfg(target_arch = "x86_64")]
fn prefetch(line: *const u8) {
    use core::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
    // SAFETY: the instruction is part of every x86-64 processor. It has no effect on the program, for any address.
    unsafe { _mm_prefetch::<_MM_HINT_T0>(line.cast()) };
}

/// Other processors have no stable instruction for it.
#[inline(always)]
#[cfg(not(target_arch = "x86_64"))]
fn prefetch(_: *const u8) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_come_in_order_with_any_rows() {
        let table = vec![1f32; 300];
        for (width, tables) in itertools::iproduct!([0, 1, 3, 300], [0, 1, 3]) {
            for count in [0, 1, 5, 200] {
                let mut seen = Vec::new();
                // Rows outside of the table are no error either.
                let row_of = |entry: usize| entry * 1_000_003;
                Prefetch::along(&vec![Prefetch::of(&table, width); tables], count, row_of, |entry| {
                    seen.push(entry);
                });
                assert_eq!(seen, (0..count).collect::<Vec<_>>());
            }
        }
    }
}
