//! The output of the program: a picture and a table for people, one JSON object for programs.

use std::collections::BTreeMap;

use candle_pipe::schedule::{Timeline, draw};
use comfy_table::Cell;
use serde::Serialize;

use super::simulations::Simulations;
use crate::table::{number, table};

/// The JSON object: the numbers of one schedule, or of several by name.
#[derive(Clone, Debug, Serialize)]
#[serde(untagged)]
pub enum Report {
    /// The numbers of the requested schedule.
    One(Numbers),
    /// The numbers of all schedules.
    All(BTreeMap<&'static str, Numbers>),
}

/// The costs of a schedule.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Numbers {
    /// The share of the step in which the ranks are idle.
    pub bubble_step: f64,
    /// The largest idle share of a rank within its own span.
    pub bubble_span: f64,
    /// The most microbatches that each rank holds.
    pub peak_activations: Vec<f64>,
    /// The time of the step.
    pub makespan: f64,
    /// The computations of all ranks; an overlapped pair counts as two.
    pub actions: usize,
    /// The measured time of the step, if it was measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub measured_makespan: Option<f64>,
}

impl Numbers {
    fn new(timeline: &Timeline) -> Self {
        Self {
            bubble_step: timeline.bubble_step(),
            bubble_span: timeline.bubble_span(),
            peak_activations: timeline.peak_activations(),
            makespan: timeline.makespan(),
            actions: timeline.ranks.iter().map(Vec::len).sum(),
            measured_makespan: None,
        }
    }

    /// Formats the largest and the smallest peak of the ranks.
    fn peaks(&self) -> String {
        let most = self.peak_activations.iter().copied().fold(0.0, f64::max);
        let least = self.peak_activations.iter().copied().fold(most, f64::min);
        if least < most { format!("{most:.2} to {least:.2}") } else { format!("{most:.2}") }
    }
}

impl Simulations {
    /// Returns the JSON object.
    pub fn report(&self) -> Report {
        let mut numbers = self.all.iter().map(|simulation| {
            let measured_makespan = simulation.measured.as_ref().map(|(_, timeline)| timeline.makespan());
            (simulation.name, Numbers { measured_makespan, ..Numbers::new(&simulation.timeline) })
        });
        match (numbers.next(), self.all.len()) {
            (Some((_, numbers)), 1) => Report::One(numbers),
            (first, _) => Report::All(first.into_iter().chain(numbers).collect()),
        }
    }

    /// Returns the picture if there is one schedule, and the table of all.
    pub fn text(&self) -> String {
        let mut rows = table(
            &["schedule"],
            &["stages", "bubble (step)", "bubble (span)", "peak", "makespan", "actions"],
        );
        for (name, timeline) in self.timelines() {
            let numbers = Numbers::new(timeline);
            let computes = timeline.ranks.iter().flatten().flat_map(|span| span.action.computes());
            let stages = computes.map(|compute| compute.stage + 1).max().unwrap_or(0);
            rows.add_row([
                Cell::new(name),
                number(stages),
                number(format_args!("{:.2} %", 100.0 * numbers.bubble_step)),
                number(format_args!("{:.2} %", 100.0 * numbers.bubble_span)),
                number(numbers.peaks()),
                number(format_args!("{:.3}", numbers.makespan)),
                number(numbers.actions),
            ]);
        }
        let picture = match &self.all[..] {
            [simulation] => draw::text(&simulation.timeline) + "\n",
            _ => String::new(),
        };
        let left_out: String = self.left_out.iter().map(|said| format!("\nleft out: {said}")).collect();
        format!("{picture}{rows}{left_out}")
    }
}
