//! The computations of all ranks.
use super::{Action, Compute, Pass, validate};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};

/// The computations of each rank, in order: every microbatch on every stage exactly once.
///
/// A schedule contains only computations; [`lower`](Self::lower) adds the communication. An empty entry is an idle
/// step, which only affects pictures and text. As JSON it is a list of texts per rank.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(into = "Vec<Vec<Option<Action>>>", try_from = "Vec<Vec<Option<Action>>>")]
pub struct Schedule {
    ranks: Vec<Vec<Option<Action>>>,
    stage_ranks: Vec<usize>,
    microbatches: usize,
}

impl Schedule {
    /// Creates a schedule from the computations of each rank.
    ///
    /// A stage belongs to the rank that computes it. Either no stage has a backward (evaluation), or each microbatch on
    /// each stage has `B`, or `I` and `W`.
    ///
    /// # Errors
    /// If a computation is missing, duplicated or before its inputs; if a stage is on several ranks, a rank has no
    /// stage, or an action is not a computation; or if the ranks would wait for each other forever. The error names
    /// rank, position and action.
    pub fn new(ranks: Vec<Vec<Option<Action>>>) -> Result<Self> {
        let (stage_ranks, microbatches) = validate::check(&ranks)?;
        Ok(Self { ranks, stage_ranks, microbatches })
    }

    /// Returns the list of each rank.
    pub fn ranks(&self) -> &[Vec<Option<Action>>] {
        &self.ranks
    }

    /// Returns the rank of each stage.
    pub fn stage_ranks(&self) -> &[usize] {
        &self.stage_ranks
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.stage_ranks.len()
    }

    /// Returns the number of microbatches.
    pub fn microbatches(&self) -> usize {
        self.microbatches
    }

    /// Returns whether there are backward passes, as in training.
    pub fn has_backward(&self) -> bool {
        // Either all stages have backward passes or none has.
        self.computes(0).any(|compute| compute.pass != Pass::Forward)
    }

    /// Returns the computations of a rank, in order; none for a rank that does not exist.
    pub fn computes(&self, rank: usize) -> impl Iterator<Item = Compute> {
        self.ranks.get(rank).into_iter().flatten().flatten().flat_map(Action::computes).copied()
    }

    /// Returns the same forwards in the same order without backwards, for evaluation.
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
