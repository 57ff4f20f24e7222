//! The command line of the measurement of dispatch, and its checks.

use std::path::PathBuf;

use clap::Parser;

use crate::cli::{Checked, Output, require};

const ABOUT: &str = "\
Measures the time that a distributed op adds to the plain candle op on its shard

One thread is one rank of a simulated mesh of 2 or 2 x 2 ranks, so that nothing is communicated; tensors are 8 x 8 f32.
Times are nanoseconds:

  plain   candle's op on this rank's shard
  warm    the time that the distributed op adds, called again and again
  first   the time that it adds the first time that tensors have this layout; shapes differ from call to call

For the redistributions that move something, plain is the same collective or copy called directly.";

const EXAMPLES: &str = "\
Examples:
  cargo run --release --bin bench-dispatch
      Measure everything.
  cargo run --release --bin bench-dispatch -- --gradients
      The same with inputs that carry gradients.
  cargo run --release --bin bench-dispatch -- --json - 2>/dev/null | jq '.rows[] | {op, axes, warm_ns}'
      Get the numbers into a script: only JSON on stdout, all else on stderr.

Exit status: 0 if all went well, 1 if an op failed, 2 if the command line cannot work.";

/// The command-line arguments; the comments on the fields are the program's help.
#[derive(Clone, Debug, Parser)]
#[command(name = "bench-dispatch", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Args {
    /// Batches of calls; each result is the median of their means
    #[arg(long, value_name = "N", default_value_t = 31)]
    pub batches: usize,

    /// Calls per batch
    #[arg(long, value_name = "N", default_value_t = 1000)]
    pub calls: usize,

    /// Inputs have gradients
    #[arg(long)]
    pub gradients: bool,

    /// Also write the results as one JSON object; `-` is stdout, without other output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl Args {
    /// Checks everything that could stop the program later.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub fn validate(&self) -> Checked {
        require!(self.batches > 0, "--batches is 0: give at least 1.");
        require!(self.calls > 0, "--calls is 0: give at least 1.");
        Output::new(self.json.as_deref()).check()
    }
}
