//! The computations of all ranks.
use super::{Action, Compute, Pass, validate};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// What each rank computes, in order: every microbatch on every stage exactly once, nothing else.
///
/// It holds computations alone, [`lower`](Self::lower) adds the communication. An empty place is a step in which a rank
/// is meant to be idle; it changes nothing but pictures and text. As JSON it is a list of texts for each rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Vec<Vec<Option<Action>>>", try_from = "Vec<Vec<Option<Action>>>")]
pub struct Schedule {
    ranks: Vec<Vec<Option<Action>>>,
    stage_ranks: Vec<usize>,
    microbatches: usize,
}

impl Schedule {
    /// A schedule of the computations of each rank.
    ///
    /// The stages are where they are computed. Either nothing has a backward (evaluation), or everything has `B`, or `I`
    /// and `W`.
    ///
    /// # Errors
    /// If a computation is missing, doubled or before what it needs, a stage on several ranks, a rank without stage, an
    /// action no computation, or if the ranks would wait for each other forever. Rank, position and action are named.
    pub fn new(ranks: Vec<Vec<Option<Action>>>) -> Result<Self> {
        let (stage_ranks, microbatches) = validate::check(&ranks)?;
        Ok(Self { ranks, stage_ranks, microbatches })
    }

    /// The list of each rank.
    pub fn ranks(&self) -> &[Vec<Option<Action>>] {
        &self.ranks
    }

    /// The rank of each stage.
    pub fn stage_ranks(&self) -> &[usize] {
        &self.stage_ranks
    }

    /// How many stages there are.
    pub fn stages(&self) -> usize {
        self.stage_ranks.len()
    }

    /// How many microbatches there are.
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Whether there are backward passes, as in training.
    pub fn has_backward(&self) -> bool {
        // Either all stages have them or none has.
        self.computes(0).any(|compute| compute.pass != Pass::Forward)
    }

    /// What a rank computes, in order; nothing for a rank that there is not.
    pub fn computes(&self, rank: usize) -> impl Iterator<Item = Compute> {
        self.ranks.get(rank).into_iter().flatten().flatten().flat_map(Action::computes).copied()
    }

    /// The same forwards in the same order without any backward, as for evaluation.
    pub fn forward_only(&self) -> Self {
        let forwards = |rank| self.computes(rank).filter(|compute| compute.pass == Pass::Forward);
        let actions = |rank| forwards(rank).map(|compute| Some(Action::Compute(compute))).collect();
        Self { ranks: (0..self.ranks.len()).map(actions).collect(), ..self.clone() }
    }
}

impl From<Schedule> for Vec<Vec<Option<Action>>> {
    fn from(schedule: Schedule) -> Self {
        schedule.ranks
    }
}

impl TryFrom<Vec<Vec<Option<Action>>>> for Schedule {
    type Error = Error;

    fn try_from(ranks: Vec<Vec<Option<Action>>>) -> Result<Self> {
        Self::new(ranks)
    }
}
