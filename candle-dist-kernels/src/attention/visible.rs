//! The keys that each query sees.
use std::ops::Range;

/// The rows of a block of keys that each query of a block sees: one range for each query.
///
/// There is one list for the whole batch, or one for each of its elements.
#[derive(Debug, Clone, PartialEq)]
pub struct Visible {
    lists: Vec<Vec<Range<usize>>>,
}

impl Visible {
    /// Uses one list for the whole batch, or one for each of its elements.
    pub fn new(lists: Vec<Vec<Range<usize>>>) -> Self {
        Self { lists }
    }

    /// All keys, or with `causal` those at `j ≤ i + (keys - queries)`.
    pub fn plain(queries: usize, keys: usize, causal: bool) -> Self {
        let range = |i: usize| 0..if causal { (i + 1 + keys).saturating_sub(queries) } else { keys };
        Self::new(vec![(0..queries).map(range).collect()])
    }

    /// The ranges of the queries of one element of the batch.
    pub fn of(&self, element: usize) -> &[Range<usize>] {
        &self.lists[if self.lists.len() == 1 { 0 } else { element }]
    }

    /// The lists as they were given.
    pub fn lists(&self) -> &[Vec<Range<usize>>] {
        &self.lists
    }

    /// Returns the number of pairs of a query and a key that it sees, in the first list.
    pub fn pairs(&self) -> usize {
        self.of(0).iter().map(Range::len).sum()
    }

    /// Returns whether some query sees some key.
    pub fn any(&self) -> bool {
        self.lists.iter().flatten().any(|range| !range.is_empty())
    }

    /// Returns whether each query sees each of `keys` keys.
    pub fn is_all(&self, keys: usize) -> bool {
        self.lists.iter().flatten().all(|range| *range == (0..keys))
    }
}

/// Some rows of the keys, and the queries that see them; ranges count from the first of these rows.
#[derive(Debug, Clone, PartialEq)]
pub struct KeyBlock {
    /// Rows of keys and values.
    pub rows: Range<usize>,
    /// Who sees them.
    pub visible: Visible,
}

/// Returns the smallest range that contains all `ranges` that are not empty.
pub(super) fn union(ranges: &[Range<usize>]) -> Range<usize> {
    let seen = || ranges.iter().filter(|range| !range.is_empty());
    match (seen().map(|range| range.start).min(), seen().map(|range| range.end).max()) {
        (Some(start), Some(end)) => start..end,
        _ => 0..0,
    }
}
