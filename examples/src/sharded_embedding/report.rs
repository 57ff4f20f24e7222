//! The program's report: tables for people, one JSON object for programs.

use comfy_table::{Cell, Table};
use serde::Serialize;

use super::args::Args;
use super::features::{DENSE, FEATURES};
use super::outcome::RunOutcome;
use super::parity::Parity;
use super::training::HELD_OUT_SAMPLES;
use crate::comm::CommStat;
use crate::table::{grouped, number, table};

/// The JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct Report {
    /// The runs, in the order they were made.
    pub runs: Vec<RunReport>,
    /// Their differences from the first one.
    pub parity: Parity,
    /// Log-loss of always predicting the share of clicks.
    pub trivial_log_loss: f64,
    /// Bytes per rank and step that an all_reduce of dense table gradients would send.
    pub dense_gradient_bytes: usize,
}

/// One run in the JSON object.
#[derive(Clone, Debug, Serialize)]
pub struct RunReport {
    /// `one device`, `row-wise` or `column-wise`.
    pub name: &'static str,
    /// Number of ranks.
    pub world: usize,
    /// Median time of a step in milliseconds.
    pub ms_per_step: f64,
    /// Samples per second in training.
    pub samples_per_s: f64,
    /// The loss of every step.
    pub losses: Vec<f64>,
    /// Mean log-loss of the trained model on held-out samples.
    pub log_loss: f64,
    /// The area under its ROC curve.
    pub auc: f64,
    /// Collectives of a step on rank 0, as means over all steps.
    pub comm_per_step: Vec<CommStat>,
}

impl Report {
    /// Sums up `outcomes`.
    ///
    /// # Errors
    /// If the runs cannot be compared; see [`Parity::of`].
    pub fn new(args: &Args, outcomes: &[RunOutcome], trivial_log_loss: f64) -> anyhow::Result<Self> {
        Ok(Self {
            runs: outcomes.iter().map(|outcome| RunReport::new(args, outcome)).collect(),
            parity: Parity::of(outcomes, args.tolerance)?,
            trivial_log_loss,
            dense_gradient_bytes: args.table_elements() * size_of::<f32>(),
        })
    }
}

impl RunReport {
    fn new(args: &Args, outcome: &RunOutcome) -> Self {
        Self {
            name: outcome.name.as_str(),
            world: outcome.world,
            ms_per_step: outcome.ms_per_step,
            samples_per_s: args.batch as f64 * 1e3 / outcome.ms_per_step,
            losses: outcome.losses.clone(),
            log_loss: outcome.quality.log_loss,
            auc: outcome.quality.auc,
            comm_per_step: outcome.comm_per_step.clone(),
        }
    }
}

/// Describes the runs before they start.
pub fn heading(args: &Args) -> String {
    let mut features = table(&["feature", "values"], &["vocabulary", "table, MB"]);
    for feature in &FEATURES {
        let megabytes = (feature.vocab * args.dim * size_of::<f32>()) as f64 / 1e6;
        features.add_row([
            Cell::new(feature.name),
            Cell::new(feature.kind()),
            number(grouped(feature.vocab)),
            number(format_args!("{megabytes:.1}")),
        ]);
    }
    format!(
        "Model     tables of {} columns, {DENSE} dense features, a perceptron over all of them\n\
         Training  {} steps of {} samples, {} on the tables at {}, seed {}\n{features}\n",
        args.dim,
        grouped(args.steps),
        grouped(args.batch),
        args.optimizer.as_str(),
        args.lr(),
        args.seed,
    )
}

/// Returns the run table, the communication table and the verdict.
pub fn summary(args: &Args, report: &Report) -> String {
    let runs = format!(
        "{}\nLog-loss and AUC of {} other samples; always to predict the share of clicks gives {:.4} and 0.5.",
        run_table(&report.runs),
        grouped(HELD_OUT_SAMPLES),
        report.trivial_log_loss,
    );
    let comm = format!("Collectives per step and rank:\n{}", comm_table(report));
    [runs, comm, verdict(args, &report.parity)].join("\n\n")
}

fn run_table(runs: &[RunReport]) -> Table {
    let mut table =
        table(&["run"], &["ranks", "ms/step", "samples/s", "first loss", "last loss", "log-loss", "AUC"]);
    let loss = |loss: Option<&f64>| number(format_args!("{:.4}", loss.unwrap_or(&f64::NAN)));
    for run in runs {
        table.add_row([
            Cell::new(run.name),
            number(run.world),
            number(format_args!("{:.2}", run.ms_per_step)),
            number(grouped(run.samples_per_s as usize)),
            loss(run.losses.first()),
            loss(run.losses.last()),
            loss(Some(&run.log_loss)),
            number(format_args!("{:.3}", run.auc)),
        ]);
    }
    table
}

fn comm_table(report: &Report) -> Table {
    let mut table = table(&["run", "collective"], &["calls", "bytes"]);
    for run in report.runs.iter().filter(|run| !run.comm_per_step.is_empty()) {
        for comm in &run.comm_per_step {
            table.add_row([
                Cell::new(run.name),
                Cell::new(&comm.op),
                number(comm.count),
                number(grouped(comm.bytes)),
            ]);
        }
        let total = run.comm_per_step.iter().map(|comm| comm.bytes).sum();
        table.add_row([Cell::new(run.name), Cell::new("all"), Cell::new(""), number(grouped(total))]);
    }
    table.add_row([
        Cell::new("replicated tables"),
        Cell::new("all_reduce of dense gradients"),
        number(FEATURES.len()),
        number(grouped(report.dense_gradient_bytes)),
    ]);
    table
}

fn verdict(args: &Args, parity: &Parity) -> String {
    let mut table =
        table(&["difference from one device"], &["loss, largest of a step", "tables, largest", "allowed"]);
    let scientific = |x: f64| number(format_args!("{x:.1e}"));
    for difference in &parity.differences {
        table.add_row([
            Cell::new(difference.run),
            scientific(difference.max_loss_diff),
            scientific(difference.max_table_diff),
            scientific(args.tolerance),
        ]);
    }
    format!("{table}\nThe runs {}.", if parity.ok { "agree" } else { "DISAGREE" })
}
