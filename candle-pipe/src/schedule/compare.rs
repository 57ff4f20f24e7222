//! All schedules that a pipeline can have, and the best of them.
use super::{Costs, Edges, Placement, Schedule, ScheduleKind, Timeline, greedy};
use crate::{Error, Result};

/// A schedule and what would happen by it.
#[derive(Debug, Clone)]
pub struct Candidate {
    /// What it is called.
    pub name: &'static str,
    /// The schedule.
    pub schedule: Schedule,
    /// Its simulation.
    pub timeline: Timeline,
}

/// Every known schedule, and the greedy ones, of a model cut into stages that cost this much, for so many ranks and
/// microbatches; but for those that would hold more than `cap` microbatches on a rank.
///
/// The stages are the same for all, and each rank has as many; a kind that wants another number is left out.
///
/// # Errors
/// If the stages cannot be spread evenly over the ranks, or as [`greedy`].
pub fn candidates(ranks: usize, microbatches: usize, edges: &Edges, costs: &Costs, cap: f64) -> Result<Vec<Candidate>> {
    let stages = edges.stages();
    if ranks == 0 || stages == 0 || !stages.is_multiple_of(ranks) {
        return Err(Error::Schedule(format!("{stages} stages cannot be spread evenly over {ranks} ranks")));
    }
    let turns = stages / ranks;
    let known =
        ScheduleKind::all().filter_map(|kind| Some((kind.name(), kind.schedule(ranks, microbatches, turns).ok()?)));
    let mut all: Vec<_> = known.collect();
    // With one stage a rank there is nothing to place.
    let placements = [("greedy", Placement::Loop), ("greedy-v", Placement::V)].into_iter().take(turns);
    for (name, placement) in placements {
        all.push((name, greedy(&placement.stage_ranks(ranks, turns), microbatches, edges, costs, cap)?));
    }
    let mut found = Vec::new();
    for (name, schedule) in all {
        let timeline = schedule.simulate(edges, costs)?;
        if timeline.peak_activations().iter().all(|&peak| peak <= cap) {
            found.push(Candidate { name, schedule, timeline });
        }
    }
    Ok(found)
}

/// The one of the [`candidates`] that takes the least time, the first of equals.
///
/// ```
/// use candle_pipe::schedule::{Costs, Edges, Placement, fastest};
///
/// let costs = Costs::per_rank(&Placement::V.stage_ranks(4, 2), 1.0, 1.0, 1.0);
/// let best = fastest(4, 8, &Edges::chain(8), &costs, 3.0)?;
/// assert_eq!(best.name, "v-half");
/// # Ok::<(), candle_pipe::Error>(())
/// ```
///
/// # Errors
/// As [`candidates`].
pub fn fastest(ranks: usize, microbatches: usize, edges: &Edges, costs: &Costs, cap: f64) -> Result<Candidate> {
    let candidates = candidates(ranks, microbatches, edges, costs, cap)?.into_iter();
    let best = candidates.min_by(|a, b| a.timeline.makespan().total_cmp(&b.timeline.makespan()));
    best.ok_or_else(|| Error::Schedule(format!("no schedule of {ranks} ranks holds at most {cap} microbatches")))
}
