//! The shape of a pipeline, and how busy it keeps its ranks.

use candle_dist::RankContext;
use candle_pipe::Runtime;
use candle_pipe::schedule::{Action, Costs, Edges, Pass, Schedule, ScheduleKind, Span, Timeline};
use serde::Serialize;

use crate::timing::median;

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
    pub fn schedule(&self) -> candle_pipe::Result<Schedule> {
        self.kind.schedule(self.pp, self.microbatches, self.virtual_stages)
    }

    /// Returns the share of a step in which the ranks are idle, if forward passes, input gradients and weight gradients
    /// take equally long on all stages.
    ///
    /// # Errors
    /// If there is no such schedule.
    pub fn bubble(&self) -> candle_pipe::Result<f64> {
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
    pub fn with_small_bubble(self, most: usize) -> candle_pipe::Result<Self> {
        let mut best: Option<(f64, Self)> = None;
        let mut refused = None;
        // Eight microbatches for each stage bring the bubble of every kind below a fifth.
        let enough = most.min(self.stages().saturating_mul(8)).max(1);
        for microbatches in (1..enough).step_by((self.pp / 8).max(1)).chain([enough]) {
            let tried = Self { microbatches, ..self };
            match tried.bubble() {
                Ok(bubble) if bubble < SMALL_BUBBLE => return Ok(tried),
                Ok(bubble) if best.as_ref().is_none_or(|(least, _)| bubble < *least) => best = Some((bubble, tried)),
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

    /// Returns the measurements of some steps, and the schedule's prediction from them.
    ///
    /// `ranks` has an entry for each rank of one pipeline: its computations in each of these steps, in one unit of
    /// time, and the peak number of open passes of its stages.
    ///
    /// # Errors
    /// Those of the simulation.
    pub fn stat(&self, ranks: &[(Vec<Vec<Span>>, usize)]) -> candle_pipe::Result<PipelineStat> {
        let (schedule, stages) = (self.schedule()?, self.stages());
        let steps = ranks.iter().map(|(steps, _)| steps.len()).min().unwrap_or(0);
        let timeline = |step: usize| Timeline {
            ranks: ranks.iter().map(|(steps, _)| steps[step].clone()).collect(),
            transfers: vec![vec![]; ranks.len()],
        };
        let mut bubbles: Vec<f64> = (0..steps).map(|step| timeline(step).bubble_step()).collect();
        let spans: Vec<&Span> = ranks.iter().flat_map(|(steps, _)| steps.iter().flatten()).collect();
        let costs = costs(&spans, stages);
        let predicted = schedule.simulate(&Edges::chain(stages), &costs)?.bubble_step();
        let per_rank = self.virtual_stages as f64;
        Ok(PipelineStat {
            schedule: self.kind.name(),
            pp: self.pp,
            dp: self.dp,
            tp: self.tp,
            stages,
            microbatches: self.microbatches,
            bubble_predicted: predicted,
            bubble_measured: if bubbles.is_empty() { 0.0 } else { median(&mut bubbles) },
            peak_activations: ranks.iter().map(|(_, peak)| *peak as f64 / per_rank).collect(),
        })
    }

    /// Returns the ranks of the first pipeline of so many ranks: index 0 on all axes but `pp`, which is the outermost.
    pub fn first_pipeline(&self, world: usize) -> impl Iterator<Item = usize> {
        (0..world).step_by(world / self.pp)
    }
}

/// Sets up the runtime for the device of the rank: message heads do not travel through a GPU.
///
/// # Errors
/// Those of the store.
pub fn for_device(runtime: Runtime, ctx: &RankContext) -> candle_pipe::Result<Runtime> {
    if ctx.device().is_cpu() { Ok(runtime) } else { runtime.heads_in_store(ctx.store()) }
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
