//! What happened when, simulated or measured.
use super::{Action, Pass};
use itertools::Itertools;
use serde::{Deserialize, Serialize};

/// An action and the time it took.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Span {
    /// What was done.
    pub action: Action,
    /// When it began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// The computations and transfers of all ranks, in the order in which each rank began them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Timeline {
    /// What each rank computed; an overlapped pair counts as two.
    pub ranks: Vec<Vec<Span>>,
    /// What each rank sent.
    pub transfers: Vec<Vec<Span>>,
}

impl Timeline {
    /// A timeline of so many ranks in which nothing happened yet.
    pub fn empty(ranks: usize) -> Self {
        Self { ranks: vec![vec![]; ranks], transfers: vec![vec![]; ranks] }
    }

    /// The time from the start of the first computation of any rank to the end of the last.
    pub fn makespan(&self) -> f64 {
        let ((start, _), (_, end)) = (self.bounds(f64::min), self.bounds(f64::max));
        end - start
    }

    /// The share of the step in which the ranks are idle: `1 - work / (ranks * makespan)`, 0 if there is no work.
    ///
    /// This is what a step costs if all ranks meet at its end.
    pub fn bubble_step(&self) -> f64 {
        share(self.idle().iter().sum(), self.ranks.len() as f64 * self.makespan())
    }

    /// The largest share of its own span that a rank is idle, from the start of its first to the end of its last
    /// computation; 0 if there is no work.
    ///
    /// This is what a step costs if each rank goes on to the next step as soon as it is through with this one.
    pub fn bubble_span(&self) -> f64 {
        let spans = self.ranks.iter().filter_map(|spans| Some((spans.first()?, spans.last()?, work(spans))));
        spans
            .map(|(first, last, work)| share(last.end - first.start - work, last.end - first.start))
            .fold(0.0, f64::max)
    }

    /// For how long each rank is idle between the first and the last computation of any rank.
    pub fn idle(&self) -> Vec<f64> {
        let makespan = self.makespan();
        self.ranks.iter().map(|spans| makespan - work(spans)).collect()
    }

    /// The most microbatches that each rank holds at once, from `F` to `B` or `W`, where a microbatch on one of the
    /// stages of a rank is as large a part of one as it has stages.
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

    /// The bound of all starts and of all ends, `(0, 0)` if there are none.
    fn bounds(&self, pick: fn(f64, f64) -> f64) -> (f64, f64) {
        let spans = self.ranks.iter().flatten().map(|span| (span.start, span.end));
        spans.reduce(|a, b| (pick(a.0, b.0), pick(a.1, b.1))).unwrap_or_default()
    }
}

fn work(spans: &[Span]) -> f64 {
    spans.iter().map(|span| span.end - span.start).sum()
}

/// A part of a whole, 0 of nothing.
fn share(part: f64, whole: f64) -> f64 {
    // Rounding of the sums can leave the part just below zero.
    if whole > 0.0 { (part / whole).max(0.0) } else { 0.0 }
}
