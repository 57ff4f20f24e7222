//! The command line of the measurement of collectives, and its checks.

use std::fmt;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Parser, ValueEnum};

use crate::cli::{Checked, Output, require};
use crate::launch::{BackendName, Launched, Patience};

/// Bytes of an element: all tensors are f32.
pub const ELEMENT_BYTES: usize = 4;
/// The most ranks for which sums of the test data are exact in f32.
const MAX_WORLD: usize = 256;
const MAX_BYTES: usize = 1 << 30;

const ABOUT: &str = "\
Measures the collectives of a process group, and checks their results

Each rank times its own call after a barrier. A row is the median over the rounds of the slowest rank's time:

  all_reduce, all_gather, reduce_scatter, all_to_all, broadcast
              an input of the given size on each rank, and a result in new memory
  send_recv   half a ping-pong of ranks 0 and 1, each of which keeps the tensor that it sends
  send_owned  the same, but each hands its tensor over; only measured when named
  all_reduce_in_place
              the elementwise maximum, written over the input; only measured when named
  all_gather_into, reduce_scatter_into, all_to_all_into, recv_into
              the same with the result in memory of the caller; only measured when named

The floor of a row is the time of plain memory copies that move as many bytes as the op must read and write, shared by
as many ranks as there are cores. The report also has the time in which a flag passes from one core to another, and that of
threads that only meet, each add the smallest size up, and meet again, if that is up to 64 KiB.

Ranks are threads of this process. With another --backend each rank is a process, and the first one shows the results.";

const EXAMPLES: &str = "\
Examples:
  cargo run --release --bin bench-collectives
      Measure everything on 2 ranks.
  cargo run --release --bin bench-collectives -- --world 4 --ops all_reduce --sizes 1MiB,16MiB
      Measure one op at sizes of your own.
  cargo run --release --bin bench-collectives -- --json - 2>/dev/null | jq '.rows[] | {op, bytes, median_us}'
      Get the numbers into a script: only JSON on stdout, all else on stderr.
  cargo run --release --bin bench-collectives -- --ops all_gather,all_gather_into,reduce_scatter,reduce_scatter_into
      Compare results in new memory with results in given memory.
  cargo build --release --features mpi && mpirun -n 2 target/release/bench-collectives --backend mpi
      Measure on 2 processes.

Exit status: 0 if all went well, 1 if an op failed or returned wrong data, 2 if the command line cannot work.";

/// The command-line arguments; the comments on the fields are the program's help.
#[derive(Clone, Debug, Parser)]
#[command(name = "bench-collectives", version, about = ABOUT, after_help = EXAMPLES)]
pub struct Args {
    /// Ranks
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub world: usize,

    /// Backend that moves tensors between ranks; for processes, start one per rank with mpirun
    #[arg(long, value_name = "NAME", default_value = "threads")]
    pub backend: BackendName,

    /// How long ranks wait.
    #[command(flatten)]
    pub patience: Patience,

    /// Ops to measure, in this order
    #[arg(
        long,
        value_name = "NAMES",
        value_delimiter = ',',
        default_value = "all_reduce,all_gather,reduce_scatter,all_to_all,broadcast,send_recv",
        hide_possible_values = true
    )]
    pub ops: Vec<OpName>,

    /// Sizes of each rank's input, in bytes, KiB, MiB or GiB
    #[arg(long, value_name = "SIZES", value_delimiter = ',', default_value = "4KiB,256KiB,4MiB,64MiB")]
    pub sizes: Vec<ByteSize>,

    /// Rounds per row [default: about a second's worth, 7 to 2001]
    #[arg(long, value_name = "N")]
    pub rounds: Option<usize>,

    /// Also write the results as one JSON object; `-` is stdout, without other output
    #[arg(long, value_name = "FILE")]
    pub json: Option<PathBuf>,
}

impl Launched for Args {
    const CPU_ONLY: Option<&'static str> = Some("floors that are copies of memory");

    fn backend(&self) -> BackendName {
        self.backend
    }

    fn patience(&self) -> Patience {
        self.patience
    }

    fn ranks(&self) -> Vec<(String, usize)> {
        vec![(format!("--world {}", self.world), self.world)]
    }
}

impl Args {
    /// Checks everything that could stop the program later.
    ///
    /// # Errors
    /// A sentence with the flag, its value and a remedy.
    pub fn validate(&self) -> Checked {
        let world = self.world;
        require!(world > 0, "--world is 0: give at least 1.");
        require!(world <= MAX_WORLD, "--world {world} is too many: give at most {MAX_WORLD}.");
        require!(self.rounds != Some(0), "--rounds is 0: give at least 1.");
        if let Some(op) = self.ops.iter().find(|op| op.is_message()) {
            require!(world > 1, "--ops {op} needs two ranks: give a --world of at least 2, or other --ops.");
        }
        for &ByteSize(bytes) in &self.sizes {
            require!(
                bytes > 0 && bytes.is_multiple_of(ELEMENT_BYTES),
                "--sizes {bytes} is not a whole number of f32: give a positive multiple of {ELEMENT_BYTES} bytes."
            );
            require!(bytes <= MAX_BYTES, "--sizes {bytes} is too much: give at most 1GiB.");
        }
        Output::new(self.json.as_deref()).check()
    }
}

/// The measured ops.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
#[value(rename_all = "snake_case")]
pub enum OpName {
    /// The sum of all ranks' tensors, on every rank.
    AllReduce,
    /// The elementwise maximum over all ranks, written over the input.
    AllReduceInPlace,
    /// The tensors of all ranks concatenated, on every rank.
    AllGather,
    /// A piece of the sum on each rank.
    ReduceScatter,
    /// A piece of every rank's tensor on each rank.
    AllToAll,
    /// Rank 0's tensor on every rank.
    Broadcast,
    /// A message that copies.
    SendRecv,
    /// A message that sends the tensor itself.
    SendOwned,
    /// `AllGather` into the caller's memory.
    AllGatherInto,
    /// `ReduceScatter` into the caller's memory.
    ReduceScatterInto,
    /// `AllToAll` into the caller's memory.
    AllToAllInto,
    /// `SendRecv` into the receiver's memory.
    RecvInto,
}

impl OpName {
    /// Returns the name on the command line and in reports.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::AllReduce => "all_reduce",
            Self::AllReduceInPlace => "all_reduce_in_place",
            Self::AllGather => "all_gather",
            Self::ReduceScatter => "reduce_scatter",
            Self::AllToAll => "all_to_all",
            Self::Broadcast => "broadcast",
            Self::SendRecv => "send_recv",
            Self::SendOwned => "send_owned",
            Self::AllGatherInto => "all_gather_into",
            Self::ReduceScatterInto => "reduce_scatter_into",
            Self::AllToAllInto => "all_to_all_into",
            Self::RecvInto => "recv_into",
        }
    }

    /// Returns whether it is a ping-pong of two ranks, whose time counts half.
    pub fn is_message(self) -> bool {
        matches!(self, Self::SendRecv | Self::SendOwned | Self::RecvInto)
    }
}

impl fmt::Display for OpName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A number of bytes, written `4096`, `4KiB`, `4MiB` or `1GiB`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteSize(pub usize);

const UNITS: [(&str, u32); 3] = [("GiB", 30), ("MiB", 20), ("KiB", 10)];

impl FromStr for ByteSize {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (digits, shift) = UNITS
            .iter()
            .find_map(|&(unit, shift)| Some((text.strip_suffix(unit)?, shift)))
            .unwrap_or((text, 0));
        let count: usize =
            digits.trim_end().parse().map_err(|_| "give a number such as 4096, 4KiB or 64MiB".to_owned())?;
        count.checked_mul(1 << shift).map(Self).ok_or_else(|| "that is more than can be addressed".to_owned())
    }
}

impl fmt::Display for ByteSize {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match UNITS.iter().find(|&&(_, shift)| self.0 > 0 && self.0.is_multiple_of(1 << shift)) {
            Some((unit, shift)) => write!(f, "{} {unit}", self.0 >> shift),
            None => write!(f, "{} B", self.0),
        }
    }
}
