//! Which documents share a sequence.

use std::collections::BTreeSet;

/// Puts documents of these lengths into sequences with room for `room`, none of them cut: the longest first, each where it leaves the least
/// room (best fit decreasing). Documents of a sequence are in their order.
///
/// The result depends on the lengths alone. Each length is at most `room`.
pub(super) fn packed(lengths: &[usize], room: usize) -> Vec<Vec<usize>> {
    let mut order: Vec<usize> = (0..lengths.len()).collect();
    order.sort_by_key(|&document| std::cmp::Reverse(lengths[document]));
    let mut sequences: Vec<Vec<usize>> = Vec::new();
    // The room that each sequence has left.
    let mut left: BTreeSet<(usize, usize)> = BTreeSet::new();
    for document in order {
        let length = lengths[document];
        let (room, sequence) = left.range((length, 0)..).next().copied().unwrap_or((room, sequences.len()));
        left.remove(&(room, sequence));
        match sequences.get_mut(sequence) {
            Some(documents) => documents.push(document),
            None => sequences.push(vec![document]),
        }
        left.insert((room.saturating_sub(length), sequence));
    }
    sequences.iter_mut().for_each(|documents| documents.sort_unstable());
    sequences
}

#[cfg(test)]
mod tests {
    use super::packed;

    #[test]
    fn each_document_is_whole_in_one_sequence_and_few_tokens_are_filled_up() {
        assert_eq!(packed(&[3, 5, 2, 4, 1], 7), [vec![1, 2], vec![0, 3], vec![4]]);
        assert_eq!(packed(&[], 7), Vec::<Vec<usize>>::new());
        let lengths: Vec<usize> = (0..500).map(|i| 1 + (i * i * 7 + i) % 64).collect();
        let sequences = packed(&lengths, 64);
        let mut seen: Vec<usize> = sequences.concat();
        seen.sort_unstable();
        assert_eq!(seen, (0..500).collect::<Vec<_>>());
        for sequence in &sequences {
            assert!(sequence.iter().map(|&document| lengths[document]).sum::<usize>() <= 64, "{sequence:?}");
            assert!(sequence.is_sorted(), "{sequence:?}");
        }
        let fewest = lengths.iter().sum::<usize>().div_ceil(64);
        assert!(sequences.len() <= fewest + fewest / 20, "{} for {fewest}", sequences.len());
    }
}
