//! Blocks of a tensor's elements, as one range of global indices per dim.
use smallvec::SmallVec;
use std::ops::Range;

/// One range of global indices per dim.
pub(crate) type Block = SmallVec<[Range<usize>; 6]>;

/// Returns the block of all elements.
pub(crate) fn whole(dims: &[usize]) -> Block {
    dims.iter().map(|&n| 0..n).collect()
}

/// Returns the number of elements, or `None` if it overflows.
pub(crate) fn volume(block: &[Range<usize>]) -> Option<usize> {
    if block.iter().any(Range::is_empty) {
        return Some(0);
    }
    block.iter().try_fold(1, |n: usize, range| n.checked_mul(range.len()))
}

/// Returns the intersection of two blocks, or `None` if it is empty.
pub(crate) fn intersection(a: &[Range<usize>], b: &[Range<usize>]) -> Option<Block> {
    let common = |(a, b): (&Range<usize>, &Range<usize>)| {
        let range = a.start.max(b.start)..a.end.min(b.end);
        (!range.is_empty()).then_some(range)
    };
    a.iter().zip(b).map(common).collect()
}

/// Returns the list indices of two blocks that overlap, if there are any.
///
/// Splits the blocks by planes that cut no block, dim by dim: blocks that differ in one dim become sorted intervals,
/// and a grid splits into its cells. Blocks that no plane separates are swept along the first dim.
pub(crate) fn first_overlap<B: AsRef<[Range<usize>]>>(blocks: &[B]) -> Option<(usize, usize)> {
    first_overlap_of(&blocks.iter().map(AsRef::as_ref).collect::<Vec<_>>())
}

fn first_overlap_of(blocks: &[&[Range<usize>]]) -> Option<(usize, usize)> {
    let with_elements = |&i: &usize| !blocks[i].iter().any(Range::is_empty);
    let mut todo = vec![(0..blocks.len()).filter(with_elements).collect::<Vec<_>>()];
    while let Some(mut group) = todo.pop() {
        if group.len() < 2 {
            continue;
        }
        let dims = blocks[group[0]].len();
        match (0..dims).find_map(|dim| parted(blocks, &mut group, dim)) {
            Some(parts) => todo.extend(parts),
            None => {
                if let Some((a, b)) = swept(blocks, &group) {
                    return Some((a.min(b), a.max(b)));
                }
            }
        }
    }
    None
}

/// Splits the group by planes across `dim`, if there is a plane that cuts no block.
fn parted(blocks: &[&[Range<usize>]], group: &mut [usize], dim: usize) -> Option<Vec<Vec<usize>>> {
    let range = |i: usize| &blocks[i][dim];
    group.sort_by_key(|&i| range(i).start);
    let (mut parts, mut end) = (Vec::new(), 0);
    for &i in &*group {
        if parts.is_empty() || range(i).start >= end {
            parts.push(Vec::new());
        }
        end = end.max(range(i).end);
        if let Some(part) = parts.last_mut() {
            part.push(i);
        }
    }
    (parts.len() > 1).then_some(parts)
}

/// Returns two blocks of the group that overlap; compares only those that overlap in the first dim.
fn swept(blocks: &[&[Range<usize>]], group: &[usize]) -> Option<(usize, usize)> {
    let first = |i: usize| blocks[i].first();
    let mut group = group.to_vec();
    group.sort_by_key(|&i| first(i).map(|range| range.start));
    let mut open: Vec<usize> = Vec::new();
    for i in group {
        let start = first(i).map(|range| range.start);
        open.retain(|&other| first(other).is_none_or(|range| Some(range.end) > start));
        let meets = |&&other: &&usize| intersection(blocks[other], blocks[i]).is_some();
        if let Some(&other) = open.iter().find(meets) {
            return Some((other, i));
        }
        open.push(i);
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;
    use itertools::Itertools;
    use proptest::prelude::*;

    #[test]
    fn a_pinwheel_is_parted_by_no_plane_and_overlaps_nowhere() {
        let pinwheel = [[0..1, 0..2], [0..2, 2..3], [2..3, 1..3], [1..3, 0..1], [1..2, 1..2]];
        assert_eq!(first_overlap(&pinwheel), None);
        let mut wider = pinwheel.to_vec();
        wider[4] = [1..2, 1..3];
        assert_eq!(first_overlap(&wider), Some((1, 4)));
    }

    #[test]
    fn scalars_overlap_and_empty_blocks_do_not() {
        assert_eq!(first_overlap::<[Range<usize>; 0]>(&[[], []]), Some((0, 1)));
        assert_eq!(first_overlap(&[[0..3, 2..2], [0..3, 0..3], [1..1, 0..3]]), None);
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(512) })]
        #[test]
        fn overlaps_are_those_of_all_pairs(
            bounds in prop::collection::vec(prop::collection::vec((0usize..6, 0usize..3), 3), 0..12),
        ) {
            let blocks: Vec<Block> =
                bounds.iter().map(|b| b.iter().map(|&(start, len)| start..start + len).collect()).collect();
            let meet = |a: usize, b: usize| intersection(&blocks[a], &blocks[b]).is_some();
            match first_overlap(&blocks) {
                Some((a, b)) => prop_assert!(a < b && meet(a, b)),
                None => prop_assert!((0..blocks.len()).array_combinations().all(|[a, b]| !meet(a, b))),
            }
        }
    }
}
