//! Schedules: PyTorch's orders, the times and memory that the literature states, text, refusals and communication.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod closed_forms;
mod drawing;
mod facts;
mod lowering;
mod made_for_costs;
mod programs;
mod random;
mod refusals;
mod simulated;
mod text;

use candle_pipe::schedule::{Costs, Edges, Schedule, ScheduleKind, Timeline};

/// The schedule of a kind that can order so much.
fn schedule(name: &str, ranks: usize, microbatches: usize, stages_per_rank: usize) -> Schedule {
    let kind: ScheduleKind = name.parse().unwrap();
    kind.schedule(ranks, microbatches, stages_per_rank).unwrap()
}

/// What happens where a rank takes so long for `F`, `I` and `W` of a microbatch, and a message so long to arrive.
fn simulated(schedule: &Schedule, [forward, input, weight]: [f64; 3], latency: f64) -> Timeline {
    let costs = Costs { latency, ..Costs::per_rank(schedule.stage_ranks(), forward, input, weight) };
    schedule.simulate(&Edges::chain(schedule.stages()), &costs).unwrap()
}

#[track_caller]
fn close(got: f64, want: f64, tolerance: f64, what: &str) {
    assert!((got - want).abs() <= tolerance, "{what}: {got} instead of {want}");
}
