//! The program's report: tables for people, one JSON object for programs.

use std::fmt::{self, Display};

use comfy_table::{Cell, Table};
use serde::Serialize;

use super::args::{Args, RunName};
use super::corpus::Corpus;
use super::outcome::RunOutcome;
use super::parity::{self, LOGIT_FACTOR, Parity};
use crate::comm::CommStat;
use crate::pipeline::PipelineStat;
use crate::table::{grouped, number, table};

/// The JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The runs, in the order they were made.
    pub runs: Vec<RunReport>,
    /// Their differences.
    pub parity: Parity,
}

/// One run in the JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// `single`, `tp`, `tp_sp`, `cp`, `ep`, `pp` or `pp_sp`.
    pub name: &'static str,
    /// Number of ranks.
    pub world: usize,
    /// Compute threads of each rank.
    pub threads: usize,
    /// Median time of a step in milliseconds.
    pub ms_per_step: f64,
    /// Page faults of the process in a step, the mean of the later half of the steps; absent where the system does not
    /// count them. Each takes the time to clear a page of 4 KiB.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub page_faults_per_step: Option<f64>,
    /// Loss of the first step.
    pub loss_first: f64,
    /// Loss of the last step.
    pub loss_last: f64,
    /// Number of parameter elements on each rank.
    pub params_per_rank: Vec<usize>,
    /// Collectives of one step.
    pub comm_per_step: Vec<CommStat>,
    /// The idle times of the ranks; only for pipelines.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pipeline: Option<PipelineStat>,
}

impl Report {
    /// Sums up `outcomes`.
    ///
    /// # Errors
    /// If the runs cannot be compared; see [`Parity::of`].
    pub fn new(outcomes: &[RunOutcome], tolerance: f64) -> anyhow::Result<Self> {
        let runs = outcomes.iter().map(RunReport::from).collect();
        Ok(Self { runs, parity: Parity::of(outcomes, tolerance)? })
    }
}

impl From<&RunOutcome> for RunReport {
    fn from(outcome: &RunOutcome) -> Self {
        Self {
            name: outcome.name.as_str(),
            world: outcome.world,
            threads: candle_core::utils::get_num_threads(),
            ms_per_step: outcome.ms_per_step,
            page_faults_per_step: outcome.page_faults_per_step,
            loss_first: outcome.losses.first().copied().unwrap_or(f64::NAN),
            loss_last: outcome.losses.last().copied().unwrap_or(f64::NAN),
            params_per_rank: outcome.params_per_rank.clone(),
            comm_per_step: outcome.comm_per_step.clone(),
            pipeline: outcome.pipeline.clone(),
        }
    }
}

/// Describes the runs in a few lines before they start.
pub fn heading(args: &Args, corpus: &Corpus) -> String {
    let source = match &args.text {
        Some(path) => path.display().to_string(),
        None => "stories that the program makes".to_owned(),
    };
    let experts = match args.mixture() {
        (0, _) => String::new(),
        (experts, top_k) => format!(", the top {top_k} of {experts} experts"),
    };
    format!(
        "Model     byte-level Transformer: {} layers, dim {}, {} heads{experts}, dropout {}{}\n\
         Training  {} steps of AdamW at {}, batch {} × {} bytes, seed {}\n\
         Text      {} bytes of {source}\n",
        args.layers,
        args.dim,
        args.heads,
        args.dropout,
        args.precision.said(),
        args.steps,
        args.lr,
        args.batch,
        args.seq,
        args.seed,
        grouped(corpus.len()),
    )
}

/// Returns the run table, the communication table and the verdict.
pub fn summary(args: &Args, report: &Report, outcomes: &[RunOutcome]) -> String {
    let mut parts = vec![run_table(args, &report.runs).to_string()];
    if report.runs.iter().any(|run| run.pipeline.is_some()) {
        parts.push(format!(
            "Pipelines, with the bubble as a share of the ranks' time:\n{}",
            pipeline_table(&report.runs)
        ));
    }
    if report.runs.iter().any(|run| !run.comm_per_step.is_empty()) {
        parts.push(format!("Collectives per step and rank:\n{}", comm_table(&report.runs)));
    }
    if let Some(run) = outcomes.iter().find(|run| !run.pictures.is_empty()) {
        let pictures: Vec<String> =
            run.pictures.iter().map(|p| format!("{}: {}", p.title, p.picture)).collect();
        parts.push(format!("How weights lie on the mesh of {}:\n\n{}", run.name, pictures.join("\n")));
    }
    parts.push(verdict(args, &report.parity, outcomes));
    parts.join("\n\n")
}

fn run_table(args: &Args, runs: &[RunReport]) -> Table {
    let mut table = table(
        &["run"],
        &["ranks", "threads", "ms/step", "tokens/s", "first loss", "last loss", "parameters per rank"],
    );
    let tokens_per_step = (args.batch * args.seq) as f64;
    for run in runs {
        table.add_row([
            Cell::new(run.name),
            number(run.world),
            number(run.threads),
            number(format_args!("{:.1}", run.ms_per_step)),
            number(grouped((tokens_per_step * 1e3 / run.ms_per_step) as usize)),
            number(format_args!("{:.4}", run.loss_first)),
            number(format_args!("{:.4}", run.loss_last)),
            number(PerRank(&run.params_per_rank)),
        ]);
    }
    table
}

fn pipeline_table(runs: &[RunReport]) -> Table {
    let mut table = table(
        &["run", "schedule"],
        &[
            "pp × dp × tp",
            "stages",
            "microbatches",
            "bubble predicted",
            "bubble measured",
            "peak activations",
        ],
    );
    for (run, pipeline) in runs.iter().filter_map(|run| Some((run, run.pipeline.as_ref()?))) {
        let percent = |share: f64| number(format_args!("{:.1} %", 100.0 * share));
        let peaks: Vec<String> = pipeline.peak_activations.iter().map(f64::to_string).collect();
        table.add_row([
            Cell::new(run.name),
            Cell::new(pipeline.schedule),
            number(format_args!("{} × {} × {}", pipeline.pp, pipeline.dp, pipeline.tp)),
            number(pipeline.stages),
            number(pipeline.microbatches),
            percent(pipeline.bubble_predicted),
            percent(pipeline.bubble_measured),
            number(peaks.join(", ")),
        ]);
    }
    table
}

fn comm_table(runs: &[RunReport]) -> Table {
    let mut table = table(&["run", "collective"], &["calls", "bytes"]);
    for run in runs {
        for comm in &run.comm_per_step {
            table.add_row([
                Cell::new(run.name),
                Cell::new(&comm.op),
                number(comm.count),
                number(grouped(comm.bytes)),
            ]);
        }
    }
    table
}

fn verdict(args: &Args, parity: &Parity, outcomes: &[RunOutcome]) -> String {
    let Some(reference) = parity::reference(outcomes).filter(|_| outcomes.len() > 1) else {
        return "One run only: nothing to compare it with.".to_owned();
    };
    let reference = match reference.name {
        RunName::Single => "one device".to_owned(),
        name => name.to_string(),
    };
    let header = format!("difference from {reference}");
    let mut table = table(&[&header, "taken over"], &["largest", "allowed"]);
    for (what, over, diff, allowed) in [
        ("loss, relative", "every step", parity.max_loss_diff, args.tolerance),
        ("gradient", "every parameter, first step", parity.max_grad_diff, args.tolerance),
        ("logit", "held-out batch, after training", parity.max_logit_diff, args.tolerance * LOGIT_FACTOR),
    ] {
        let scientific = |x| number(format_args!("{x:.1e}"));
        table.add_row([Cell::new(what), Cell::new(over), scientific(diff), scientific(allowed)]);
    }
    let diverged =
        outcomes.iter().find_map(|run| Some((run, run.losses.iter().position(|loss| !loss.is_finite())?)));
    let why = match diverged {
        Some((run, step)) => {
            format!(" Training diverged: the loss of {} is no number at step {step}; lower --lr.", run.name)
        }
        None => String::new(),
    };
    format!("{table}\nThe runs {}.{why}", if parity.ok { "agree" } else { "DISAGREE" })
}

/// The number of parameters on each rank, printed once if all are equal.
struct PerRank<'a>(&'a [usize]);

impl Display for PerRank<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut counts: Vec<String> = self.0.iter().copied().map(grouped).collect();
        counts.dedup();
        f.write_str(&counts.join(", "))
    }
}
