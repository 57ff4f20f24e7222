//! The command line of the measurement of sharded embeddings, and its checks.

use std::path::PathBuf;

use clap::Parser;

use crate::cli::{Checked, Output, require};

const MAX_RANKS: usize = 256;
/// The most elements of a table, and of the rows that a rank looks up.
const MAX_ELEMENTS: usize = 1 << 30;

const ABOUT: &str = "\
Measures lookups in a sharded table, and steps that train it

Each rank looks up its own ids, drawn anew in each round, and times its own call after a barrier. A row is the median
over the rounds of the slowest rank's time:

  forward  the lookup, which can be differentiated
  step     the lookup, its backward pass, and gradient descent on the rows that were looked up

The f32 table is cut by rows or by columns. With max_norm, about half of the rows are too long. Rows that a call has
shortened are restored before the next call, which is not timed. The first lookup of each case is checked.";

const EXAMPLES: &str = "\
Examples:
  cargo run --release --bin bench-embedding
      Measure a table of 100,000 rows on 2 ranks.
  cargo run --release --bin bench-embedding -- --vocab 1000000 --dim 128 --ids 65536
      Measure a larger table and more ids.
  cargo run --release --bin bench-embedding -- --json - 2>/dev/null | jq '.rows[] | {sharding, max_norm, phase, ms}'
      Get the numbers into a script: only JSON on stdout, all else on stderr.

Exit status: 0 if all went well, 1 if a lookup failed or returned wrong rows, 2 if the command line cannot work.";

/// The command-line arguments; the comments on the fields are the program's help.
#[derive(Clone, Debug, Parser)]
#[command(name = "bench-embedding", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Args {
    /// Ranks, each a thread
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub ranks: usize,

    /// Rows of the table
    #[arg(long, value_name = "N", default_value_t = 100_000)]
    pub vocab: usize,

    /// Columns of the table
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub dim: usize,

    /// Ids that each rank looks up
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub ids: usize,

    /// Rounds per row [default: about two seconds' worth, 51 to 201]
    #[arg(long, value_name = "N")]
    pub rounds: Option<usize>,

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
        let Self { ranks, vocab, dim, ids, .. } = *self;
        for (flag, value) in [("--ranks", ranks), ("--vocab", vocab), ("--dim", dim), ("--ids", ids)] {
            require!(value > 0, "{flag} is 0: give at least 1.");
        }
        require!(ranks <= MAX_RANKS, "--ranks {ranks} is too many: give at most {MAX_RANKS}.");
        for (flag, rows) in [("--vocab", vocab), ("--ids", ids)] {
            require!(
                rows.checked_mul(dim).is_some_and(|elements| elements <= MAX_ELEMENTS),
                "{flag} {rows} is too much with --dim {dim}: give at most {}.",
                MAX_ELEMENTS / dim
            );
        }
        require!(self.rounds != Some(0), "--rounds is 0: give at least 1.");
        Output::new(self.json.as_deref()).check()
    }
}
