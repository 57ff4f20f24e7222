//! The messages along the edges between stages, given the ranks of the stages.
//!
//! **Grouping.** A forward pass sends one message to each other rank whose stages use its values. The address
//! is the first of these stages ([`Routes::values_to`]), and the message serves all of them. A backward pass
//! sends one message to each stage on another rank that made its inputs. Everything that knows of messages
//! asks here: lowering, which also writes what each message carries, the checks of programs, the simulator,
//! and the ranks when they run.
use super::{Compute, Edges, Flow, Message, Pass};
use itertools::Itertools;

/// The edges of a model and the ranks of its stages.
#[derive(Clone, Copy)]
pub(crate) struct Routes<'a> {
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
    /// Returns what goes from a computation to other stages, as messages, also to stages of its own rank.
    pub(crate) fn passed(self, compute: Compute) -> Vec<Message> {
        let Compute { stage, microbatch, .. } = compute;
        match compute.makes() {
            Some(Flow::Activation) => {
                let messages = self.edges.consumers(stage).iter().map(|&to| self.values_to(stage, to, microbatch));
                messages.unique().sorted_by_key(|message| self.stage_ranks[message.to]).collect()
            }
            Some(flow @ Flow::Gradient) => {
                let producers = self.edges.producers(stage).iter();
                producers.map(|&to| Message { flow, from: stage, to, microbatch }).collect()
            }
            None => vec![],
        }
    }

    /// Returns the messages after a computation, in the order of their sends.
    pub(super) fn after(self, compute: Compute) -> Vec<Message> {
        let mut messages = self.passed(compute);
        messages.retain(|message| !self.together(message.from, message.to));
        messages
    }

    /// Returns the messages before a computation.
    pub(crate) fn awaited(self, compute: Compute) -> impl Iterator<Item = Message> {
        self.before(compute).into_iter().filter_map(|need| match need {
            Need::Message(message) => Some(message),
            Need::Local { .. } => None,
        })
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
            Need::Message(match flow {
                Flow::Activation => self.values_to(from, stage, microbatch),
                Flow::Gradient => Message { flow, from, to: stage, microbatch },
            })
        };
        from.iter().map(need).collect()
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
