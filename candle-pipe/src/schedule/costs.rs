//! The costs of the parts of a pipeline.
use super::{Compute, Flow, Message, Pass};
use crate::{Error, Result};
use std::collections::BTreeMap;

/// The times of computations and messages, in any common unit of time.
#[derive(Debug, Clone, PartialEq)]
pub struct Costs {
    /// The time of `F` per stage, for one microbatch.
    pub forward: Vec<f64>,
    /// The time of `I` per stage; `B` takes the sum of `I` and `W`.
    pub input: Vec<f64>,
    /// The time of `W` per stage.
    pub weight: Vec<f64>,
    /// The time from the end of a transfer until the message has arrived.
    pub latency: f64,
    /// The time for which one byte occupies the link between two ranks.
    pub per_byte: f64,
    /// The bytes that each stage sends to a later one per microbatch; gradients have the same size.
    pub bytes: Vec<f64>,
    /// The bytes between two stages where `bytes` does not apply: a value that skips stages may have another size than
    /// the one for the next stage.
    pub edge_bytes: BTreeMap<(usize, usize), f64>,
}

impl Costs {
    /// Creates costs with free communication and equal ranks: each time is that of a rank, for one microbatch and all
    /// of its stages together.
    pub fn per_rank(stage_ranks: &[usize], forward: f64, input: f64, weight: f64) -> Self {
        let share = |rank: &usize| stage_ranks.iter().filter(|&other| other == rank).count() as f64;
        let split = |time: f64| stage_ranks.iter().map(|rank| time / share(rank)).collect();
        let (latency, per_byte, bytes) = (0.0, 0.0, vec![0.0; stage_ranks.len()]);
        let (forward, input, weight) = (split(forward), split(input), split(weight));
        Self { forward, input, weight, latency, per_byte, bytes, edge_bytes: BTreeMap::new() }
    }

    /// Returns the time of a computation; requires costs that [`fit`](Self::fit).
    pub(super) fn of(&self, compute: Compute) -> f64 {
        let stage = compute.stage;
        match compute.pass {
            Pass::Forward => self.forward[stage],
            Pass::Backward => self.input[stage] + self.weight[stage],
            Pass::Input => self.input[stage],
            Pass::Weight => self.weight[stage],
        }
    }

    /// Returns for how long a message occupies the link between its ranks; requires costs that [`fit`](Self::fit).
    pub(super) fn occupies(&self, message: Message) -> f64 {
        let (producer, user) = match message.flow {
            Flow::Activation => (message.from, message.to),
            Flow::Gradient => (message.to, message.from),
        };
        self.edge_bytes.get(&(producer, user)).unwrap_or(&self.bytes[producer]) * self.per_byte
    }

    /// Refuses costs for another number of stages, and negative or non-finite costs.
    pub(super) fn fit(&self, stages: usize) -> Result<()> {
        let lists = [
            ("forward", &self.forward),
            ("input", &self.input),
            ("weight", &self.weight),
            ("bytes", &self.bytes),
        ];
        for (name, list) in lists {
            if list.len() != stages {
                let said =
                    format!("{} {name} costs do not fit {stages} stages: give one per stage", list.len());
                return Err(Error::Schedule(said));
            }
        }
        if let Some((from, to)) = self.edge_bytes.keys().find(|(from, to)| from >= to || *to >= stages) {
            let said = format!(
                "bytes of stage {from} for stage {to} of {stages}: give those of a stage for a later one"
            );
            return Err(Error::Schedule(said));
        }
        let each = lists.iter().flat_map(|(name, list)| list.iter().map(move |&cost| (*name, cost)));
        let edges = self.edge_bytes.values().map(|&bytes| ("edge_bytes", bytes));
        for (name, cost) in each.chain(edges).chain([("latency", self.latency), ("per_byte", self.per_byte)])
        {
            if !(cost.is_finite() && cost >= 0.0) {
                return Err(Error::Schedule(format!(
                    "a {name} cost is {cost}: give a finite one that is not negative"
                )));
            }
        }
        Ok(())
    }
}
