//! The command line of the measurement of experts, and its checks.

use std::fmt;
use std::path::PathBuf;

use clap::{Parser, ValueEnum};

use crate::arguments::check_counts;
use crate::cli::{Checked, Output, require};

const ABOUT: &str = "\
Measures a mixture of experts whose tokens and experts are distributed over ranks, forward and backward

Ranks are threads of this process. Tokens are f32, and each uses the best --top-k of --experts gated feed-forward
networks. With uniform routing all experts are equally likely; with zipf routing the n-th expert is n times less likely
than the first. A time is the median over the rounds of the slowest rank's milliseconds for a forward and a backward pass;
rows sent are the tokens that travel from one rank to another and back. The busiest rank is shown by its number of rows
over the mean of all ranks. With --balance each routing is measured again with a bias that has learned to balance it. One
rank computes the same without communication.";

const EXAMPLES: &str = "\
Examples:
  cargo run --release --bin bench-moe -- --ranks 2
      Measure both routings on two ranks.
  cargo run --release --bin bench-moe -- --ranks 1 --threads 2
      Measure one device with two threads, to compare with.
  cargo run --release --bin bench-moe -- --ranks 2 --routing zipf --json - 2>/dev/null
      Get the numbers into a script: only JSON on stdout, all else on stderr.
  cargo run --release --bin bench-moe -- --ranks 4 --balance 100
      Measure both routings without and with the bias that balances them.

Exit status: 0 if all went well, 1 if the layer failed, 2 if the command line cannot work.";

/// The command-line arguments; the comments on the fields are the program's help.
#[derive(Clone, Debug, Parser)]
#[command(name = "bench-moe", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Args {
    /// Ranks that share tokens and experts
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub ranks: usize,

    /// How tokens choose experts [default: both]
    #[arg(long, value_name = "NAMES", value_delimiter = ',')]
    pub routing: Vec<RoutingName>,

    /// Tokens of all ranks
    #[arg(long, value_name = "N", default_value_t = 2048)]
    pub tokens: usize,

    /// Width of a token, at least --experts
    #[arg(long, value_name = "N", default_value_t = 256)]
    pub width: usize,

    /// Width between the products of an expert
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub hidden: usize,

    /// Experts
    #[arg(long, value_name = "N", default_value_t = 16)]
    pub experts: usize,

    /// Experts that each token uses
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub top_k: usize,

    /// Also measure each routing after this many steps of the bias that balances the choice; 0 for none
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub balance: usize,

    /// Compute threads of each rank [default: the cores divided by the ranks]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,

    /// Rounds, after one that warms up
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub rounds: usize,

    /// Also write the results as one JSON object; `-` is stdout, without other output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

/// The most ranks and threads.
const MOST_RANKS: usize = 256;
/// The most of anything else.
const MOST: usize = 1 << 20;
/// The most elements of tokens and of weights.
const MOST_ELEMENTS: usize = 1 << 32;

impl Args {
    /// Checks everything that could stop the program later.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub fn validate(&self) -> Checked {
        let Self { ranks, tokens, width, hidden, experts, top_k, threads, rounds, .. } = *self;
        check_counts([
            ("--ranks", ranks, MOST_RANKS),
            ("--tokens", tokens, MOST),
            ("--width", width, MOST),
            ("--hidden", hidden, MOST),
            ("--experts", experts, MOST),
            ("--top-k", top_k, MOST),
            ("--threads", threads.unwrap_or(1), MOST_RANKS),
            ("--rounds", rounds, MOST),
        ])?;
        require!(
            self.balance <= MOST,
            "--balance {} is too large: use at most {MOST} steps, such as 100.",
            self.balance
        );
        require!(
            top_k <= experts,
            "--top-k {top_k} is more than the {experts} experts: use at most {experts}, or more --experts."
        );
        // The first columns of tokens are the router's logits.
        require!(
            experts <= width,
            "--width {width} is less than the {experts} experts: use at least {experts}."
        );
        let weights = experts.saturating_mul(width).saturating_mul(hidden);
        require!(
            weights <= MOST_ELEMENTS,
            "--experts {experts} × --width {width} × --hidden {hidden} are too many elements: use at most {MOST_ELEMENTS}."
        );
        let rows = tokens.saturating_mul(top_k).saturating_mul(width.max(hidden));
        require!(
            rows <= MOST_ELEMENTS,
            "--tokens {tokens} with --top-k {top_k} are too many elements: use at most {MOST_ELEMENTS}."
        );
        Output::new(self.json.as_deref()).check()
    }

    /// Returns the routings to measure.
    pub fn routings(&self) -> &[RoutingName] {
        if self.routing.is_empty() { &[RoutingName::Uniform, RoutingName::Zipf] } else { &self.routing }
    }
}

/// How tokens choose experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum RoutingName {
    /// All experts are equally likely.
    Uniform,
    /// The n-th expert is n times less likely than the first.
    Zipf,
}

impl RoutingName {
    /// The name on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Uniform => "uniform",
            Self::Zipf => "zipf",
        }
    }

    /// What is added to the logit of an expert.
    pub fn favor(self, expert: usize) -> f64 {
        match self {
            Self::Uniform => 0.0,
            Self::Zipf => -((expert + 1) as f64).ln(),
        }
    }
}

impl fmt::Display for RoutingName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
