//! Which keys a query sees, by the positions of both.
use super::options::Attention;
use super::order::TokenOrder;
use crate::kernels::{KeyBlock, Visible};
use std::ops::Range;

/// The mask of one call.
#[derive(Debug, Clone)]
pub(super) struct Mask {
    options: Attention,
    queries: usize,
    keys: usize,
}

impl Mask {
    pub(super) fn new(options: &Attention, queries: usize, keys: usize) -> Self {
        Self { options: options.clone(), queries, keys }
    }

    /// Returns the blocks of the `keys` rows for the `queries` rows of some elements of the batch. Their rows count
    /// from the first of `keys`.
    pub(super) fn blocks(
        &self,
        queries: &Range<usize>,
        keys: &Range<usize>,
        batch: &Range<usize>,
    ) -> Vec<KeyBlock> {
        let runs = self.runs(keys);
        let block = |run: Range<usize>| {
            let visible = self.visible(queries, &run, batch);
            KeyBlock { rows: run.start - keys.start..run.end - keys.start, visible }
        };
        runs.into_iter().map(block).collect()
    }

    /// Returns whether some of the `queries` rows see some of the `keys` rows.
    pub(super) fn sees(&self, queries: &Range<usize>, keys: &Range<usize>, batch: &Range<usize>) -> bool {
        let runs = self.runs(keys);
        let mut elements = if self.differs() { batch.clone() } else { 0..1 };
        elements.any(|element| {
            let sees = |row: usize| {
                runs.iter().any(|run| !self.rows(self.range(element, self.position(row)), run).is_empty())
            };
            queries.clone().rev().any(sees)
        })
    }

    fn key_order(&self) -> Option<&TokenOrder> {
        self.options.key_order.as_ref().or(self.options.order.as_ref())
    }

    /// Returns the ascending runs of some rows of keys.
    fn runs(&self, keys: &Range<usize>) -> Vec<Range<usize>> {
        self.key_order().map_or_else(|| vec![keys.clone()], |order| order.runs(keys.clone()))
    }

    fn differs(&self) -> bool {
        self.options.documents.as_ref().is_some_and(|documents| documents.differ())
    }

    fn visible(&self, queries: &Range<usize>, run: &Range<usize>, batch: &Range<usize>) -> Visible {
        let list = |element: usize| {
            queries.clone().map(|row| self.rows(self.range(element, self.position(row)), run)).collect()
        };
        Visible::new(if self.differs() { batch.clone().map(list).collect() } else { vec![list(0)] })
    }

    fn position(&self, row: usize) -> usize {
        self.options.order.as_ref().map_or(row, |order| order.positions()[row])
    }

    /// Returns the positions of the keys that a query at `position` sees.
    fn range(&self, element: usize, position: usize) -> Range<usize> {
        // The last query is at the position of the last key.
        let own = position + self.keys;
        let below = |ahead: usize| (own + ahead).saturating_sub(self.queries).min(self.keys);
        let (mut start, mut end) = (0, if self.options.causal { below(1) } else { self.keys });
        if let Some(window) = self.options.window {
            start = (own + 1).saturating_sub(self.queries.saturating_add(window));
            end = end.min(below(window.min(self.keys + self.queries)));
        }
        let mut first = 0;
        if let Some(documents) = &self.options.documents {
            let document = documents.of(element, position);
            (start, end, first) = (start.max(document.start), end.min(document.end), document.start);
        }
        if let Some(chunk) = self.options.chunk {
            let own = own.saturating_sub(self.queries).saturating_sub(first);
            let begin = first + own / chunk * chunk;
            (start, end) = (start.max(begin), end.min(begin.saturating_add(chunk)));
        }
        start..end.max(start)
    }

    /// Returns the rows of an ascending run at these positions, counted from the run's start.
    fn rows(&self, positions: Range<usize>, run: &Range<usize>) -> Range<usize> {
        let first = |position: usize| match self.key_order() {
            Some(order) => order.positions()[run.clone()].partition_point(|&at| at < position),
            None => position.clamp(run.start, run.end) - run.start,
        };
        first(positions.start)..first(positions.end)
    }
}
