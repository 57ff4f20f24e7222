//! Timelines, simulated or measured.
use super::{Action, Pass};
use itertools::Itertools;
use serde::{Deserialize, Serialize};

/// An action with its start and end time.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// The action.
    pub action: Action,
    /// The start time.
    pub start: f64,
    /// The end time.
    pub end: f64,
}

/// The computations and transfers of all ranks, ordered by their start on each rank.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// The computations of each rank; an overlapped pair counts as two.
    pub ranks: Vec<Vec<Span>>,
    /// The messages that each rank sent.
    pub transfers: Vec<Vec<Span>>,
}

impl Timeline {
    /// Creates an empty timeline for `ranks` ranks.
    pub fn empty(ranks: usize) -> Self {
        Self { ranks: vec![vec![]; ranks], transfers: vec![vec![]; ranks] }
    }

    /// Returns the time from the start of the first computation of any rank to the end of the last.
    pub fn makespan(&self) -> f64 {
        let ((start, _), (_, end)) = (self.bounds(f64::min), self.bounds(f64::max));
        end - start
    }

    /// Returns the share of the step in which the ranks are idle: `1 - work / (ranks * makespan)`, or 0 without work.
    ///
    /// This is the cost of a step if all ranks synchronize at its end.
    pub fn bubble_step(&self) -> f64 {
        share(self.idle().iter().sum(), self.ranks.len() as f64 * self.makespan())
    }

    /// Returns the largest idle share of a rank within its own span, from the start of its first to the end of its last
    /// computation, or 0 without work.
    ///
    /// This is the cost of a step if each rank continues with the next step as soon as it has finished this one.
    pub fn bubble_span(&self) -> f64 {
        let spans = self.ranks.iter().filter_map(|spans| Some((spans.first()?, spans.last()?, work(spans))));
        spans
            .map(|(first, last, work)| share(last.end - first.start - work, last.end - first.start))
            .fold(0.0, f64::max)
    }

    /// Returns the time for which each rank is idle between the first and the last computation of any rank.
    pub fn idle(&self) -> Vec<f64> {
        let makespan = self.makespan();
        self.ranks.iter().map(|spans| makespan - work(spans)).collect()
    }

    /// Returns the most microbatches that each rank holds at once, from `F` to `B` or `W`. On a rank with `v` stages, a
    /// microbatch on one of them counts `1/v`.
    pub fn peak_activations(&self) -> Vec<f64> {
        let peak = |spans: &Vec<Span>| {
            let computes = || spans.iter().flat_map(|span| span.action.computes());
            let stages = computes().map(|compute| compute.stage).unique().count();
            let (mut held, mut peak) = (0, 0);
            for compute in computes() {
                match compute.pass {
                    Pass::Forward => held += 1,
                    Pass::Backward | Pass::Weight => held -= 1,
                    Pass::Input => {}
                }
                peak = peak.max(held);
            }
            share(f64::from(peak), stages as f64)
        };
        self.ranks.iter().map(peak).collect()
    }

    /// Combines all starts and all ends with `pick`; `(0, 0)` without spans.
    fn bounds(&self, pick: fn(f64, f64) -> f64) -> (f64, f64) {
        let spans = self.ranks.iter().flatten().map(|span| (span.start, span.end));
        spans.reduce(|a, b| (pick(a.0, b.0), pick(a.1, b.1))).unwrap_or_default()
    }
}

fn work(spans: &[Span]) -> f64 {
    spans.iter().map(|span| span.end - span.start).sum()
}

/// Returns a part of a whole, or 0 if the whole is 0.
fn share(part: f64, whole: f64) -> f64 {
    // Rounding of the sums can move the part just below zero.
    if whole > 0.0 { (part / whole).max(0.0) } else { 0.0 }
}
