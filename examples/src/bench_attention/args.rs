//! The command line of the measurement of attention, and its checks.

use std::fmt;
use std::path::PathBuf;

use candle_core::DType;
use candle_shard::ContextWay;
use clap::{Parser, ValueEnum};

use crate::arguments::check_counts;
use crate::cli::{Checked, Output, require};

const ABOUT: &str = "\
Measures causal attention of a sequence that is cut over ranks, forward and backward

Ranks are threads of this process. Query, key and value are one sequence, cut in zigzag order so that all ranks have
equal work. A time is the median over the rounds of the slowest rank's milliseconds; bytes are those that the busiest rank
passes to others. One rank computes the same without communication.";

const EXAMPLES: &str = "\
Examples:
  cargo run --release --bin bench-attention -- --ranks 2 --length 4096 --way ring
      Measure ring attention on two ranks.
  cargo run --release --bin bench-attention -- --ranks 1 --length 4096
      Measure one device, to compare with.
  cargo run --release --bin bench-attention -- --ranks 2 --length 4096 --way gather --json - 2>/dev/null
      Get the numbers into a script: only JSON on stdout, all else on stderr.

Exit status: 0 if all went well, 1 if attention failed, 2 if the command line cannot work.";

/// The command-line arguments; the comments on the fields are the program's help.
#[derive(Clone, Debug, Parser)]
#[command(name = "bench-attention", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Args {
    /// Ranks that share the sequence
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub ranks: usize,

    /// Tokens of the sequence
    #[arg(long, value_name = "N", default_value_t = 4096)]
    pub length: usize,

    /// How keys meet queries on other ranks
    #[arg(long, value_name = "WAY", default_value = "ring")]
    pub way: WayName,

    /// Query heads
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub heads: usize,

    /// Key heads; they divide the query heads
    #[arg(long, value_name = "N", default_value_t = 8)]
    pub kv_heads: usize,

    /// Width of a head
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub dim: usize,

    /// Dtype of query, key and value: f32, f64, bf16 or f16
    #[arg(long, value_name = "DTYPE", default_value = "f32")]
    pub dtype: DType,

    /// Keys that a query sees, itself included [default: all until itself]
    #[arg(long, value_name = "N")]
    pub window: Option<usize>,

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
/// The most tokens.
const MOST_TOKENS: usize = 1 << 20;
/// The most elements of a query.
const MOST_ELEMENTS: usize = 1 << 32;

impl Args {
    /// Checks everything that could stop the program later.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub fn validate(&self) -> Checked {
        let Self { ranks, length, heads, kv_heads, dim, dtype, window, threads, rounds, .. } = *self;
        check_counts([
            ("--ranks", ranks, MOST_RANKS),
            ("--length", length, MOST_TOKENS),
            ("--heads", heads, MOST_TOKENS),
            ("--kv-heads", kv_heads, MOST_TOKENS),
            ("--dim", dim, MOST_TOKENS),
            ("--window", window.unwrap_or(1), MOST_TOKENS),
            ("--threads", threads.unwrap_or(1), MOST_RANKS),
            ("--rounds", rounds, MOST_TOKENS),
        ])?;
        let elements = length.saturating_mul(heads).saturating_mul(dim);
        require!(
            elements <= MOST_ELEMENTS,
            "--length {length} × --heads {heads} × --dim {dim} are too many elements: use at most {MOST_ELEMENTS}."
        );
        require!(
            heads.is_multiple_of(kv_heads),
            "--heads {heads} is not divisible by --kv-heads {kv_heads}: use a multiple of it."
        );
        require!(
            matches!(dtype, DType::F32 | DType::F64 | DType::BF16 | DType::F16),
            "--dtype {} has no attention: use f32, f64, bf16 or f16.",
            dtype.as_str()
        );
        Output::new(self.json.as_deref()).check()
    }
}

/// How keys meet queries.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum WayName {
    /// Keys and values travel from rank to rank.
    Ring,
    /// All ranks gather all keys and values.
    Gather,
    /// Each rank gets some heads of the whole sequence.
    Ulysses,
}

impl WayName {
    /// The name on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Ring => "ring",
            Self::Gather => "gather",
            Self::Ulysses => "ulysses",
        }
    }

    /// The option of attention.
    pub fn way(self) -> ContextWay {
        match self {
            Self::Ring => ContextWay::Ring,
            Self::Gather => ContextWay::Gather,
            Self::Ulysses => ContextWay::Heads,
        }
    }
}

impl fmt::Display for WayName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}
