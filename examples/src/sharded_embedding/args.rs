//! The command line of the click-through program, and its checks.

use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use super::features::FEATURES;
use crate::arguments::{check_counts, check_positive};
use crate::cli::{Checked, Output, require};
use crate::launch::{BackendName, Launched, Patience};

const ABOUT: &str = "\
Trains a click-through model with large embedding tables, sharded and on one device, and shows that they agree

A synthetic log has dense features, and categorical features with Zipf-distributed values, one per sample or in bags of
several. A hidden model draws the clicks. The same model is trained three times, from the same seed on the same samples:

  one device   one rank has all tables and the whole batch; the other runs must agree with it
  row-wise     each rank has some rows of every table, and its own part of the batch
  column-wise  each rank has some columns of every table, and its own part of the batch

Ranks are threads of this process, so there is nothing to install or to start. With another --backend each rank is a
process, and the first one shows the results.";

const EXAMPLES: &str = "\
Examples:
  cargo run --release --bin sharded-embedding
      Compare the three runs on 2 ranks.
  cargo run --release --bin sharded-embedding -- --ranks 4 --dim 64 --steps 500
      Wider tables on more ranks, for longer.
  cargo run --release --bin sharded-embedding -- --json - 2>/dev/null | jq '.runs[] | {name, samples_per_s}'
      Get the numbers into a script: only JSON on stdout, all else on stderr.
  cargo build --release --features mpi && mpirun -n 2 target/release/sharded-embedding --backend mpi
      Compare the three runs on 2 processes.

Exit status: 0 if the runs agree, 1 if they disagree or one failed, 2 if the command line cannot work.";

/// The command-line arguments; the comments on the fields are the program's help.
#[derive(Clone, Debug, Parser)]
#[command(name = "sharded-embedding", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Args {
    /// Ranks of the sharded runs
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub ranks: usize,

    /// Backend that moves tensors between ranks; for processes, start one per rank with mpirun
    #[arg(long, value_name = "NAME", default_value = "threads")]
    pub backend: BackendName,

    /// How long ranks wait.
    #[command(flatten)]
    pub patience: Patience,

    /// Optimizer steps
    #[arg(long, value_name = "N", default_value_t = 200)]
    pub steps: usize,

    /// Samples per step, over all ranks
    #[arg(long, value_name = "N", default_value_t = 2047)]
    pub batch: usize,

    /// Columns of every table
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub dim: usize,

    /// Optimizer of the tables, which updates only rows that were looked up
    #[arg(long, value_name = "NAME", default_value = "adagrad")]
    pub optimizer: OptimizerName,

    /// Learning rate of the tables [default: 0.05 for adagrad, 50 for sgd, 0.005 for adamw]
    #[arg(long, value_name = "X", allow_negative_numbers = true)]
    pub lr: Option<f64>,

    /// Seed of the log and the initial parameters
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,

    /// Largest difference of losses and of table elements at which runs count as equal
    #[arg(long, value_name = "X", default_value_t = 1e-5, allow_negative_numbers = true)]
    pub tolerance: f64,

    /// Also write the results as one JSON object; `-` is stdout, without other output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The optimizer of the tables.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "lower")]
pub enum OptimizerName {
    /// Gradient descent.
    Sgd,
    /// Adagrad.
    Adagrad,
    /// Lazy AdamW.
    AdamW,
}

impl OptimizerName {
    /// Returns the name in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Sgd => "SGD",
            Self::Adagrad => "Adagrad",
            Self::AdamW => "AdamW",
        }
    }

    fn default_lr(self) -> f64 {
        match self {
            Self::Sgd => 50.0,
            Self::Adagrad => 0.05,
            Self::AdamW => 0.005,
        }
    }
}

const MAX_RANKS: usize = 64;
const MAX_STEPS: usize = 100_000_000;
const MAX_BATCH: usize = 1 << 24;
const MAX_DIM: usize = 1024;

impl Launched for Args {
    fn backend(&self) -> BackendName {
        self.backend
    }

    fn patience(&self) -> Patience {
        self.patience
    }

    fn ranks(&self) -> Vec<(String, usize)> {
        vec![(format!("--ranks {}", self.ranks), self.ranks)]
    }
}

impl Args {
    /// Returns the learning rate of the tables.
    pub fn lr(&self) -> f64 {
        self.lr.unwrap_or(self.optimizer.default_lr())
    }

    /// Returns the number of elements of all tables.
    pub fn table_elements(&self) -> usize {
        FEATURES.iter().map(|feature| feature.vocab * self.dim).sum()
    }

    /// Checks everything that could stop the program later.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub fn validate(&self) -> Checked {
        let Self { ranks, steps, batch, dim, tolerance, .. } = *self;
        check_counts([
            ("--ranks", ranks, MAX_RANKS),
            ("--steps", steps, MAX_STEPS),
            ("--batch", batch, MAX_BATCH),
            ("--dim", dim, MAX_DIM),
        ])?;
        require!(
            ranks <= batch,
            "--ranks {ranks} is more than the {batch} samples of --batch: give at most {batch} ranks."
        );
        let lr = self.lr();
        check_positive("--lr", lr, "something around 0.05")?;
        require!(
            tolerance.is_finite() && tolerance >= 0.0,
            "--tolerance {tolerance} is not a finite number of at least 0: try 0.00001."
        );
        Output::new(self.json.as_deref()).check()
    }
}
