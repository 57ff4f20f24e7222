//! The command line of the schedules program, and its checks.

use std::path::PathBuf;
use std::str::FromStr;

use candle_pipe::schedule::ScheduleKind;
use clap::Parser;

use crate::arguments::check_counts;
use crate::cli::{Checked, Output, UsageError, check_file, require};

const ABOUT: &str = "\
Draws a pipeline schedule as text, SVG or trace, and prints its costs

Ranks compute in the order of the schedule, as early as they can. The times are those of a rank for one microbatch, in
any unit; communication only delays the arrival of a message. A picture has one column per rank, and in it the stage,
the pass (F forward, I input gradients, W weight gradients, B both) and the microbatch.

  bubble (step)    the share of the time from the first to the last computation of all ranks in which they are idle
  bubble (span)    the same for the worst rank, between its own first and last computation
  peak             the most microbatches that each rank holds

Names: gpipe, 1f1b, eager-1f1b, interleaved-1f1b, looped-bfs, zb-h1, zb-h2, interleaved-zb, zbv, v-half, v-min,
dualpipev; greedy for a schedule generated from the costs, and all for a table of them.";

const EXAMPLES: &str = "\
Examples:
  cargo run --release --bin schedules -- --schedule all --ranks 8 --microbatches 32
      Compare all schedules.
  cargo run --release --bin schedules -- --schedule zbv --svg zbv.svg --trace zbv.json
      Draw one schedule for a browser and for ui.perfetto.dev.
  cargo run --release --bin schedules -- --load mine.csv --weight-cost 0.5 --json - 2>/dev/null
      Get the numbers of a schedule of your own, one line per rank, in a script.

Exit status: 0 if all went well, 1 if a file could not be written, 2 if the command line is invalid.";

/// The most ranks, microbatches and stages per rank.
const MOST: usize = 1 << 20;

/// The most stages of all ranks.
const MOST_STAGES: usize = 1 << 12;

/// The largest time; sums of such times stay finite.
const LONGEST: f64 = 1e100;

/// The command-line arguments; the comments on the fields are the program's help.
#[derive(Clone, Debug, Parser)]
#[command(name = "schedules", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Args {
    /// The schedule, `greedy`, or `all`
    #[arg(long, value_name = "NAME", default_value = "1f1b")]
    pub schedule: Choice,

    /// Ranks of the pipeline
    #[arg(long, value_name = "P", default_value_t = 4)]
    pub ranks: usize,

    /// Microbatches of a step
    #[arg(long, value_name = "M", default_value_t = 8)]
    pub microbatches: usize,

    /// Stages per rank; default: as many as the schedule needs
    #[arg(long, value_name = "V")]
    pub virtual_stages: Option<usize>,

    /// Read a schedule from this CSV file instead: one line per rank, one action per cell
    #[arg(long, value_name = "FILE", conflicts_with_all = ["schedule", "ranks", "microbatches", "virtual_stages"])]
    pub load: Option<PathBuf>,

    /// Time of a rank for the forward of one microbatch
    #[arg(
        long,
        value_name = "TIME",
        default_value_t = 1.0,
        allow_negative_numbers = true,
        help_heading = "Costs"
    )]
    pub forward_cost: f64,

    /// Time of a rank for the input gradients of one microbatch
    #[arg(
        long,
        value_name = "TIME",
        default_value_t = 1.0,
        allow_negative_numbers = true,
        help_heading = "Costs"
    )]
    pub input_cost: f64,

    /// Time of a rank for the weight gradients of one microbatch
    #[arg(
        long,
        value_name = "TIME",
        default_value_t = 1.0,
        allow_negative_numbers = true,
        help_heading = "Costs"
    )]
    pub weight_cost: f64,

    /// Time until a message arrives
    #[arg(
        long,
        value_name = "TIME",
        default_value_t = 0.0,
        allow_negative_numbers = true,
        help_heading = "Costs"
    )]
    pub latency: f64,

    /// Microbatches that a rank may hold under `greedy`; default: the number of ranks
    #[arg(long, value_name = "N", help_heading = "Costs")]
    pub memory: Option<f64>,

    /// Write an SVG picture
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub svg: Option<PathBuf>,

    /// Write the times for a trace viewer, as seconds
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub trace: Option<PathBuf>,

    /// Write the schedule as CSV
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub csv: Option<PathBuf>,

    /// A measured timeline as JSON, to draw and print next to the prediction
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub measured: Option<PathBuf>,

    /// Run it on threads whose stages sleep, this many seconds per unit of time, and print the result next to the
    /// prediction
    #[arg(
        long,
        value_name = "SECONDS",
        conflicts_with = "measured",
        allow_negative_numbers = true,
        help_heading = "Output"
    )]
    pub measure: Option<f64>,

    /// Also write the numbers as one JSON object; `-` is stdout, which then has nothing else
    #[arg(long, value_name = "FILE", help_heading = "Output")]
    pub json: Option<PathBuf>,
}

/// The choice of schedules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// All schedules that fit.
    All,
    /// The greedy schedule for the costs.
    Greedy,
    /// A known schedule.
    Kind(ScheduleKind),
}

impl FromStr for Choice {
    type Err = candle_pipe::Error;

    fn from_str(name: &str) -> Result<Self, Self::Err> {
        match name {
            "all" => Ok(Self::All),
            "greedy" => Ok(Self::Greedy),
            _ => name.parse().map(Self::Kind),
        }
    }
}

impl Args {
    /// Checks all arguments that do not depend on the schedule.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub(super) fn validate(&self) -> Checked {
        let stages = self.virtual_stages.unwrap_or(1);
        check_counts([
            ("--ranks", self.ranks, MOST),
            ("--microbatches", self.microbatches, MOST),
            ("--virtual-stages", stages, MOST),
        ])?;
        require!(
            self.ranks.saturating_mul(stages) <= MOST_STAGES,
            "--ranks {} with {stages} stages each are too many: give at most {MOST_STAGES} stages.",
            self.ranks
        );
        let costs = [
            ("--forward-cost", self.forward_cost),
            ("--input-cost", self.input_cost),
            ("--weight-cost", self.weight_cost),
            ("--latency", self.latency),
        ];
        for (flag, cost) in costs {
            require!(cost.is_finite() && cost >= 0.0, "{flag} {cost} is not a time: give 0 or more.");
            require!(cost <= LONGEST, "{flag} {cost:e} is too long: give at most {LONGEST:e}.");
        }
        if let Some(unit) = self.measure {
            require!(
                unit.is_finite() && unit > 0.0,
                "--measure {unit} is not a time: give seconds, more than 0."
            );
            require!(self.latency == 0.0, "--measure does not support latency: leave out --latency.");
        }
        let all = self.load.is_none() && self.schedule == Choice::All;
        let makes = all || self.load.is_none() && self.schedule == Choice::Greedy;
        require!(
            makes || self.memory.is_none(),
            "--memory applies only to greedy schedules: add --schedule greedy, or all."
        );
        require!(!all || self.csv.is_none(), "--csv writes one schedule: name it with --schedule.");
        for (flag, path) in [("--svg", &self.svg), ("--trace", &self.trace), ("--csv", &self.csv)] {
            if let Some(path) = path {
                check_file(flag, path, "")?;
            }
        }
        Output::new(self.json.as_deref()).check()
    }
}

/// Returns the error for the file of a flag.
pub(super) fn unreadable(flag: &str, path: &std::path::Path, said: impl std::fmt::Display) -> UsageError {
    UsageError(format!("{flag} {}: {said}.", path.display()))
}
