//! The order of one rank under construction.
use crate::schedule::{Action, Compute, Pass};
use std::collections::{HashMap, VecDeque};

/// Computations; each pass takes the microbatches of a stage in order.
#[derive(Default)]
pub(super) struct PassOrder {
    pub(super) actions: Vec<Action>,
    /// The next microbatch of each stage, for forwards and for backwards.
    next: HashMap<(usize, bool), usize>,
    /// Computations with an `I` and no `W` yet, the oldest first.
    weights: VecDeque<(usize, usize)>,
}

impl PassOrder {
    pub(super) fn forward(&mut self, stage: usize) {
        let compute = self.take(stage, Pass::Forward);
        self.actions.push(Action::Compute(compute));
    }

    pub(super) fn backward(&mut self, stage: usize) {
        let compute = self.take(stage, Pass::Backward);
        self.actions.push(Action::Compute(compute));
    }

    pub(super) fn input(&mut self, stage: usize) {
        let compute = self.take(stage, Pass::Input);
        self.weights.push_back((stage, compute.microbatch));
        self.actions.push(Action::Compute(compute));
    }

    /// Adds the oldest pending `W`, if any.
    pub(super) fn weight(&mut self) {
        let oldest = self.weights.pop_front();
        self.actions.extend(oldest.map(weight));
    }

    /// Adds the oldest pending `W` of a stage, if any.
    pub(super) fn weight_of(&mut self, stage: usize) {
        let oldest = self.weights.iter().position(|&(other, _)| other == stage);
        self.actions.extend(oldest.and_then(|i| self.weights.remove(i)).map(weight));
    }

    /// Adds all pending `W`.
    pub(super) fn weights(&mut self) {
        self.actions.extend(self.weights.drain(..).map(weight));
    }

    /// Adds a forward of one stage overlapped with a backward of another.
    pub(super) fn overlap(&mut self, forward: usize, backward: usize) {
        let pair = [self.take(forward, Pass::Forward), self.take(backward, Pass::Backward)];
        self.actions.push(Action::Overlap(pair));
    }

    /// Returns the number of forwards of a stage so far.
    pub(super) fn forwards(&self, stage: usize) -> usize {
        self.next.get(&(stage, true)).copied().unwrap_or(0)
    }

    fn take(&mut self, stage: usize, pass: Pass) -> Compute {
        let next = self.next.entry((stage, pass == Pass::Forward)).or_default();
        let microbatch = *next;
        *next += 1;
        Compute { stage, pass, microbatch }
    }
}

fn weight((stage, microbatch): (usize, usize)) -> Action {
    Action::Compute(Compute { stage, pass: Pass::Weight, microbatch })
}
