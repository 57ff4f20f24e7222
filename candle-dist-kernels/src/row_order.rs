//! Sorts a list of rows in time that does not depend on the size of the table.

/// candle's index for no element: it reads as zero, and nothing is written to it.
pub const NOWHERE: u32 = u32::MAX;

/// The entries of a list of rows, grouped by row.
///
/// Each entry contains a row in its upper half and a position in its lower half; entries are in ascending order.
pub(super) struct RowOrder(Vec<u64>);

/// The number of values of one digit of the radix sort.
const DIGITS: usize = 1 << DIGIT_BITS;
const DIGIT_BITS: u32 = 11;

impl RowOrder {
    /// Sorts digit by digit, with one pass per digit of the largest row.
    pub(super) fn of(rows: &[u32]) -> Self {
        let mut keys: Vec<u64> =
            rows.iter().zip(0..).map(|(&row, at): (_, u64)| u64::from(row) << 32 | at).collect();
        let mut sorted = vec![0; keys.len()];
        let largest = u64::from(rows.iter().copied().max().unwrap_or(0));
        let mut shift = 32;
        while largest >> (shift - 32) > 0 {
            let digit = |key: u64| (key >> shift) as usize & (DIGITS - 1);
            let mut places = [0usize; DIGITS];
            keys.iter().for_each(|&key| places[digit(key)] += 1);
            let mut next = 0;
            for place in &mut places {
                next += std::mem::replace(place, next);
            }
            for &key in &keys {
                let place = &mut places[digit(key)];
                sorted[*place] = key;
                *place += 1;
            }
            std::mem::swap(&mut keys, &mut sorted);
            shift += DIGIT_BITS;
        }
        Self(keys)
    }

    /// Returns each row that occurs, with its entries.
    #[inline(always)]
    pub(super) fn groups(&self) -> impl Iterator<Item = (u32, &[u64])> {
        self.0.chunk_by(|a, b| a >> 32 == b >> 32).map(|group| ((group[0] >> 32) as u32, group))
    }
}

/// Returns the list position of an entry.
#[inline(always)]
pub(super) fn position(entry: u64) -> usize {
    entry as u32 as usize
}

/// Returns the distinct rows of a list in ascending order, and for each entry of the list the index of its row among
/// them.
pub fn unique_rows_and_places(rows: &[u32]) -> (Vec<u32>, Vec<u32>) {
    let (mut unique, mut places) = (Vec::with_capacity(rows.len()), vec![0; rows.len()]);
    for (row, group) in RowOrder::of(rows).groups() {
        group.iter().for_each(|&entry| places[position(entry)] = unique.len() as u32);
        unique.push(row);
    }
    (unique, places)
}

/// Returns the distinct rows of a list in ascending order.
pub fn unique_rows(rows: &[u32]) -> Vec<u32> {
    RowOrder::of(rows).groups().map(|(row, _)| row).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn entries_are_in_the_order_of_a_stable_sort(
            rows in prop::collection::vec(prop_oneof![0u32..9, 2000u32..2100, any::<u32>()], 0..300),
        ) {
            let mut want: Vec<(u32, usize)> = rows.iter().copied().zip(0..).collect();
            want.sort();
            let order = RowOrder::of(&rows);
            let got: Vec<(u32, usize)> =
                order.groups().flat_map(|(row, group)| group.iter().map(move |&entry| (row, position(entry)))).collect();
            prop_assert_eq!(&got, &want);
            want.dedup_by_key(|(row, _)| *row);
            let (unique, places) = unique_rows_and_places(&rows);
            prop_assert_eq!(places.iter().map(|&place| unique[place as usize]).collect::<Vec<_>>(), &rows[..]);
            prop_assert_eq!(&unique, &unique_rows(&rows));
            prop_assert_eq!(unique, want.into_iter().map(|(row, _)| row).collect::<Vec<_>>());
        }
    }
}
