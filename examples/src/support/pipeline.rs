//! How busy a pipeline keeps its ranks.

use candle_pipe::Pipeline;
use candle_pipe::schedule::{Action, Costs, Edges, Pass, Span, Timeline};
use serde::Serialize;

use crate::timing::median;

/// How the ranks of a pipeline were kept busy.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct PipelineStat {
    /// Name of the schedule.
    pub schedule: &'static str,
    /// Ranks of a pipeline.
    pub pp: usize,
    /// Replicas of the model.
    pub dp: usize,
    /// Tensor-parallel ranks of a stage.
    pub tp: usize,
    /// Stages of all ranks.
    pub stages: usize,
    /// Microbatches of a replica.
    pub microbatches: usize,
    /// The share of a step in which the ranks would be idle if all computations took their median times.
    pub bubble_predicted: f64,
    /// The measured share of a step in which the ranks were idle, the median over the last steps.
    pub bubble_measured: f64,
    /// The peak number of microbatches of each rank. With several stages per rank, a microbatch on one stage counts as
    /// a fraction.
    pub peak_activations: Vec<f64>,
}

/// Returns the measurements of some steps, and the schedule's prediction from them.
///
/// `ranks` has an entry for each rank of one pipeline: its computations in each of these steps, in one unit of
/// time, and the peak number of open passes of its stages.
///
/// # Errors
/// Those of the simulation.
pub fn stat(pipeline: &Pipeline, ranks: &[(Vec<Vec<Span>>, usize)]) -> candle_pipe::Result<PipelineStat> {
    let (schedule, stages) = (pipeline.schedule()?, pipeline.stages());
    let steps = ranks.iter().map(|(steps, _)| steps.len()).min().unwrap_or(0);
    let timeline = |step: usize| Timeline {
        ranks: ranks.iter().map(|(steps, _)| steps[step].clone()).collect(),
        transfers: vec![vec![]; ranks.len()],
    };
    let mut bubbles: Vec<f64> = (0..steps).map(|step| timeline(step).bubble_step()).collect();
    let spans: Vec<&Span> = ranks.iter().flat_map(|(steps, _)| steps.iter().flatten()).collect();
    let costs = costs(&spans, stages);
    let predicted = schedule.simulate(&Edges::chain(stages), &costs)?.bubble_step();
    let per_rank = pipeline.virtual_stages as f64;
    Ok(PipelineStat {
        schedule: pipeline.kind.name(),
        pp: pipeline.pp,
        dp: pipeline.dp,
        tp: pipeline.tp,
        stages,
        microbatches: pipeline.microbatches,
        bubble_predicted: predicted,
        bubble_measured: if bubbles.is_empty() { 0.0 } else { median(&mut bubbles) },
        peak_activations: ranks.iter().map(|(_, peak)| *peak as f64 / per_rank).collect(),
    })
}

/// Returns the median time of each kind of computation on each stage. A backward pass that is not split counts as input
/// gradients.
fn costs(spans: &[&Span], stages: usize) -> Costs {
    let time = |stage: usize, passes: &[Pass]| {
        let of = |span: &&&Span| match span.action {
            Action::Compute(compute) => compute.stage == stage && passes.contains(&compute.pass),
            _ => false,
        };
        let mut times: Vec<f64> = spans.iter().filter(of).map(|span| span.end - span.start).collect();
        if times.is_empty() { 0.0 } else { median(&mut times) }
    };
    let each = |passes: &[Pass]| (0..stages).map(|stage| time(stage, passes)).collect();
    Costs {
        forward: each(&[Pass::Forward]),
        input: each(&[Pass::Backward, Pass::Input]),
        weight: each(&[Pass::Weight]),
        latency: 0.0,
        per_byte: 0.0,
        bytes: vec![0.0; stages],
        edge_bytes: Default::default(),
    }
}
