//! The messages along the edges between stages, given the ranks of the stages.
use super::{Compute, Edges, Flow, Message, Pass};
use itertools::Itertools;

/// The edges of a model and the ranks of its stages.
#[derive(Clone, Copy)]
pub(super) struct Routes<'a> {
    pub(super) edges: &'a Edges,
    pub(super) stage_ranks: &'a [usize],
}

/// An input that a computation needs from another stage.
pub(super) enum Need {
    /// The output of a stage on the same rank.
    Local { flow: Flow, stage: usize },
    /// A message from another rank.
    Message(Message),
}

impl Routes<'_> {
    /// Returns the messages after a computation, in the order of their sends.
    pub(super) fn after(self, compute: Compute) -> Vec<Message> {
        let Compute { stage, microbatch, .. } = compute;
        let here = self.stage_ranks[stage];
        let message = |flow, to| Message { flow, from: stage, to, microbatch };
        match compute.makes() {
            Some(Flow::Activation) => {
                let elsewhere = self.edges.consumers(stage).iter().filter(|&&to| self.stage_ranks[to] != here);
                // The consumers are in order, so the one that is kept for a rank is its first.
                let by_rank =
                    elsewhere.sorted_by_key(|&&to| self.stage_ranks[to]).dedup_by(|a, b| self.together(**a, **b));
                by_rank.map(|&to| message(Flow::Activation, to)).collect()
            }
            Some(Flow::Gradient) => {
                let elsewhere = self.edges.producers(stage).iter().filter(|&&to| self.stage_ranks[to] != here);
                elsewhere.map(|&to| message(Flow::Gradient, to)).collect()
            }
            None => vec![],
        }
    }

    /// Returns the inputs that a computation needs from other stages.
    pub(super) fn before(self, compute: Compute) -> Vec<Need> {
        let Compute { stage, microbatch, .. } = compute;
        let from = match compute.pass {
            Pass::Forward => self.edges.producers(stage),
            Pass::Backward | Pass::Input => self.edges.consumers(stage),
            Pass::Weight => &[],
        };
        let need = |&from: &usize| {
            let flow = if compute.pass == Pass::Forward { Flow::Activation } else { Flow::Gradient };
            if self.together(from, stage) {
                return Need::Local { flow, stage: from };
            }
            let to = match flow {
                Flow::Activation => self.first_consumer(from, stage),
                Flow::Gradient => stage,
            };
            Need::Message(Message { flow, from, to, microbatch })
        };
        from.iter().map(need).collect()
    }

    /// Returns the first stage on the rank of `stage` that uses values of `producer`.
    fn first_consumer(self, producer: usize, stage: usize) -> usize {
        let mut consumers = self.edges.consumers(producer).iter().copied();
        consumers.find(|&to| self.together(to, stage)).unwrap_or(stage)
    }

    fn together(self, a: usize, b: usize) -> bool {
        self.stage_ranks[a] == self.stage_ranks[b]
    }
}
