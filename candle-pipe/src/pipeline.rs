//! The shape of a pipeline on the axes of a mesh.

use crate::schedule::{Costs, Edges, Schedule, ScheduleKind};

/// Ranks on the axes of the mesh, and the schedule of its pipelines.
#[derive(Clone, Copy, Debug)]
pub struct Pipeline {
    /// Ranks of a pipeline.
    pub pp: usize,
    /// Replicas of the model.
    pub dp: usize,
    /// Ranks over which the tokens of a sequence are distributed.
    pub cp: usize,
    /// Ranks over which the experts of a replica are distributed, each with a part of its batch.
    pub ep: usize,
    /// Tensor-parallel ranks of a stage.
    pub tp: usize,
    /// The order of the computations of each rank.
    pub kind: ScheduleKind,
    /// Stages of each rank.
    pub virtual_stages: usize,
    /// Parts of a replica's batch.
    pub microbatches: usize,
}

/// The largest bubble to aim for, if the batch has enough microbatches.
const SMALL_BUBBLE: f64 = 0.2;

impl Pipeline {
    /// Returns the number of ranks.
    pub fn world(&self) -> usize {
        self.pp * self.dp * self.cp * self.ep * self.tp
    }

    /// Returns the number of parts of a batch that different ranks have.
    pub fn parts(&self) -> usize {
        self.dp * self.ep
    }

    /// Returns the number of stages.
    pub fn stages(&self) -> usize {
        self.pp.saturating_mul(self.virtual_stages)
    }

    /// Returns the schedule.
    ///
    /// # Errors
    /// If the kind has no schedule for this number of ranks and microbatches.
    pub fn schedule(&self) -> crate::Result<Schedule> {
        self.kind.schedule(self.pp, self.microbatches, self.virtual_stages)
    }

    /// Returns the share of a step in which the ranks are idle, if forward passes, input gradients and weight gradients
    /// take equally long on all stages.
    ///
    /// # Errors
    /// If there is no such schedule.
    pub fn bubble(&self) -> crate::Result<f64> {
        let schedule = self.schedule()?;
        let costs = Costs::per_rank(schedule.stage_ranks(), 1.0, 1.0, 1.0);
        Ok(schedule.simulate(&Edges::chain(self.stages()), &costs)?.bubble_step())
    }

    /// Returns this pipeline with the fewest microbatches, up to `most`, that leave ranks idle for less than a fifth of
    /// a step. If no number does, it uses the number that leaves them idle the least.
    ///
    /// Fewer microbatches make larger products, which take less time in total.
    ///
    /// # Errors
    /// If the kind has no schedule for any of these numbers of microbatches.
    pub fn with_small_bubble(self, most: usize) -> crate::Result<Self> {
        let mut best: Option<(f64, Self)> = None;
        let mut refused = None;
        // Eight microbatches for each stage bring the bubble of every kind below a fifth.
        let enough = most.min(self.stages().saturating_mul(8)).max(1);
        for microbatches in (1..enough).step_by((self.pp / 8).max(1)).chain([enough]) {
            let tried = Self { microbatches, ..self };
            match tried.bubble() {
                Ok(bubble) if bubble < SMALL_BUBBLE => return Ok(tried),
                Ok(bubble) if best.as_ref().is_none_or(|(least, _)| bubble < *least) => {
                    best = Some((bubble, tried));
                }
                Ok(_) => {}
                Err(error) => refused = Some(error),
            }
        }
        match (best, refused) {
            (Some((_, best)), _) => Ok(best),
            (None, Some(error)) => Err(error),
            (None, None) => Ok(self),
        }
    }

    /// Returns the ranks of the first pipeline of so many ranks: index 0 on all axes but `pp`, which is the outermost.
    pub fn first_pipeline(&self, world: usize) -> impl Iterator<Item = usize> {
        (0..world).step_by((world / self.pp.max(1)).max(1))
    }
}
