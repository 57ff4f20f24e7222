//! The messages along the edges between stages, given the ranks of the stages.
//!
//! **Grouping.** A forward pass sends one message to each other rank whose stages use its values. The address
//! is the first of these stages ([`Routes::values_to`]), and the message serves all of them. A backward pass
//! sends one message to each stage on another rank that made its inputs. Everything that knows of messages
//! asks here: lowering, which also writes what each message carries, the checks of programs, the simulator,
//! and the ranks when they run.
use super::{Compute, Edges, Flow, Message};
use itertools::Itertools;

/// The edges of a model and the ranks of its stages.
#[derive(Clone, Copy)]
pub(crate) struct Routes<'a> {
    pub(super) edges: &'a Edges,
    pub(super) stage_ranks: &'a [usize],
}

impl Routes<'_> {
    /// Returns what goes from a computation to other stages, as messages, also to stages of its own rank.
    pub(crate) fn passed(self, compute: Compute) -> Vec<Message> {
        let Compute { stage, microbatch, .. } = compute;
        match compute.makes() {
            Some(Flow::Activation) => {
                let messages =
                    self.edges.consumers(stage).iter().map(|&to| self.values_to(stage, to, microbatch));
                messages.unique().sorted_by_key(|message| self.stage_ranks[message.to]).collect()
            }
            Some(flow @ Flow::Gradient) => {
                let producers = self.edges.producers(stage).iter();
                producers.map(|&to| Message { flow, from: stage, to, microbatch }).collect()
            }
            None => vec![],
        }
    }

    /// Returns what a computation needs from other stages, as messages, also from stages of its own rank.
    pub(super) fn needed(self, compute: Compute) -> Vec<Message> {
        let Compute { stage, microbatch, .. } = compute;
        match compute.makes() {
            Some(Flow::Activation) => self
                .edges
                .producers(stage)
                .iter()
                .map(|&from| self.values_to(from, stage, microbatch))
                .collect(),
            Some(flow @ Flow::Gradient) => {
                let consumers = self.edges.consumers(stage).iter();
                consumers.map(|&from| Message { flow, from, to: stage, microbatch }).collect()
            }
            None => vec![],
        }
    }

    /// Returns the messages after a computation, in the order of their sends.
    pub(super) fn after(self, compute: Compute) -> impl Iterator<Item = Message> {
        self.passed(compute).into_iter().filter(move |&message| !self.is_local(message))
    }

    /// Returns the messages before a computation.
    pub(crate) fn before(self, compute: Compute) -> impl Iterator<Item = Message> {
        self.needed(compute).into_iter().filter(move |&message| !self.is_local(message))
    }

    /// Returns whether both stages are on one rank, so that nothing is sent.
    pub(crate) fn is_local(self, message: Message) -> bool {
        self.together(message.from, message.to)
    }

    /// Returns the message that brings values of stage `from` to stage `to`. It is addressed to the first
    /// stage of that rank that uses values of `from`.
    pub(super) fn values_to(self, from: usize, to: usize, microbatch: usize) -> Message {
        let first = self.edges.consumers(from).iter().copied().find(|&user| self.together(user, to));
        Message { flow: Flow::Activation, from, to: first.unwrap_or(to), microbatch }
    }

    fn together(self, a: usize, b: usize) -> bool {
        self.stage_ranks[a] == self.stage_ranks[b]
    }
}
