//! The command line of the measurement of loading, and its checks.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::Parser;

use crate::cli::{Checked, Output, require};

/// The largest file that is written for a measurement.
const MAX_BYTES: usize = 4 << 30;
/// Bytes of an element: all weights are f32.
pub const ELEMENT_BYTES: usize = 4;

const ABOUT: &str = "\
Measures how long a rank takes to load its shard of a weight from a safetensors file

One thread loads the second shard. The file has just been written, so it is read from memory and not from the disk. A
row is the median over the rounds:

  ours      Weights::read of candle-shard
  compared  the same from a checkpoint, whose blocks are compared with their digests
  candle    ShardedSafeTensors of candle-nn, on a memory map

All must return the same numbers. GB/s is the speed at which the blocks of the checkpoint are read and compared.";

const EXAMPLES: &str = "\
Examples:
  cargo run --release --bin bench-loading
      Measure shards of rows and of columns of a 4096 x 4096 weight on 2 ranks.
  cargo run --release --bin bench-loading -- --world 8 --shapes 1024x1024,65536x64
      Measure other weights, one of them with short rows.
  cargo run --release --bin bench-loading -- --json - 2>/dev/null | jq '.rows[] | {dim, ratio}'
      Get the numbers into a script: only JSON on stdout, all else on stderr.

Exit status: 0 if all went well, 1 if loading failed or returned wrong data, 2 if the command line cannot work.";

/// The command-line arguments; the comments on the fields are the program's help.
#[derive(Clone, Debug, Parser)]
#[command(name = "bench-loading", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Args {
    /// Ranks over which a weight is sharded
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub world: usize,

    /// Shapes of the weights, rows x columns
    #[arg(long, value_name = "SHAPES", value_delimiter = ',', default_value = "4096x4096")]
    pub shapes: Vec<Size>,

    /// Rounds per row
    #[arg(long, value_name = "N", default_value_t = 11)]
    pub rounds: usize,

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
        let world = self.world;
        require!(world > 1, "--world {world} cuts nothing: give at least 2.");
        require!(self.rounds > 0, "--rounds is 0: give at least 1.");
        for size in &self.shapes {
            let Size { rows, columns } = *size;
            require!(
                rows > 0 && columns > 0 && rows.is_multiple_of(world) && columns.is_multiple_of(world),
                "--shapes {size} does not divide by {world} ranks, which candle asks for: give multiples of {world}."
            );
            let bytes = rows.checked_mul(columns).and_then(|n| n.checked_mul(ELEMENT_BYTES));
            require!(
                bytes.is_some_and(|n| n <= MAX_BYTES),
                "--shapes {size} is too much: give at most 4 GiB of f32."
            );
        }
        Output::new(self.json.as_deref()).check()
    }
}

/// The shape of a weight, written `4096x1024`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Size {
    /// Dim 0.
    pub rows: usize,
    /// Dim 1.
    pub columns: usize,
}

impl FromStr for Size {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let parsed =
            text.split_once('x').map(|(rows, columns)| (rows.trim().parse(), columns.trim().parse()));
        match parsed {
            Some((Ok(rows), Ok(columns))) => Ok(Self { rows, columns }),
            _ => Err("give rows x columns, such as 4096x1024".to_owned()),
        }
    }
}

impl fmt::Display for Size {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}x{}", self.rows, self.columns)
    }
}
