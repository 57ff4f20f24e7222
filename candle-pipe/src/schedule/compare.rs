//! Comparison of all schedules that a pipeline can have.
use super::{Costs, Edges, Schedule, ScheduleKind, StageOrder, Timeline, greedy};
use crate::{Error, Result};

/// A schedule and its simulation.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct Candidate {
    /// The name.
    pub name: &'static str,
    /// The schedule.
    pub schedule: Schedule,
    /// Its simulation.
    pub timeline: Timeline,
}

/// Returns every known schedule and the greedy ones for a model with these stages and costs, and for these numbers of
/// ranks and microbatches. Schedules that hold more than `cap` microbatches on a rank are left out.
///
/// All schedules have the same stages, with equal numbers of stages per rank; a kind that needs another number is left
/// out.
///
/// # Errors
/// If the stages cannot be distributed evenly over the ranks, and the errors of [`greedy`].
pub fn candidates(
    ranks: usize,
    microbatches: usize,
    edges: &Edges,
    costs: &Costs,
    cap: f64,
) -> Result<Vec<Candidate>> {
    let stages = edges.stages();
    if ranks == 0 || stages == 0 || !stages.is_multiple_of(ranks) {
        return Err(Error::Schedule(format!("{stages} stages cannot be spread evenly over {ranks} ranks")));
    }
    let turns = stages / ranks;
    let known = ScheduleKind::all()
        .filter_map(|kind| Some((kind.name(), kind.schedule(ranks, microbatches, turns).ok()?)));
    let mut all: Vec<_> = known.collect();
    // With one stage per rank the two orders of stages are one.
    let stage_orders = [("greedy", StageOrder::Loop), ("greedy-v", StageOrder::V)].into_iter().take(turns);
    for (name, stage_order) in stage_orders {
        all.push((name, greedy(&stage_order.stage_ranks(ranks, turns), microbatches, edges, costs, cap)?));
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

/// Returns the fastest of the [`candidates`], and the first one if several are equal.
///
/// ```
/// use candle_pipe::schedule::{Costs, Edges, StageOrder, fastest};
///
/// let costs = Costs::per_rank(&StageOrder::V.stage_ranks(4, 2), 1.0, 1.0, 1.0);
/// let best = fastest(4, 8, &Edges::chain(8), &costs, 3.0)?;
/// assert_eq!(best.name, "v-half");
/// # Ok::<(), candle_pipe::Error>(())
/// ```
///
/// # Errors
/// Those of [`candidates`].
pub fn fastest(
    ranks: usize,
    microbatches: usize,
    edges: &Edges,
    costs: &Costs,
    cap: f64,
) -> Result<Candidate> {
    let candidates = candidates(ranks, microbatches, edges, costs, cap)?.into_iter();
    let best = candidates.min_by(|a, b| a.timeline.makespan().total_cmp(&b.timeline.makespan()));
    best.ok_or_else(|| {
        Error::Schedule(format!("no schedule of {ranks} ranks holds at most {cap} microbatches"))
    })
}
