//! Runs the same program on every backend: ranks are threads of this process, or processes from a launcher.
//!
#![doc = include_str!("README.md")]

mod alone;
mod gather;
mod processes;
mod ranks;
mod stop;
mod voice;

use std::ffi::OsString;
use std::process::ExitCode;
use std::time::Duration;

use candle_core::cuda::set_gemm_reduced_precision_f32;
use clap::{ArgMatches, Args, Parser, ValueEnum};
use serde::Serialize;

pub use alone::{on_first, on_some};
pub use gather::{Bits, gather};
pub(crate) use processes::is_first;
pub use processes::{local_rank, local_size};
pub use ranks::Ranks;
pub use stop::StopSignal;

use crate::cli::{self, Checked, require};

/// The backend that moves tensors between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum BackendName {
    /// Ranks are threads of this process
    #[value(alias = "local")]
    Threads,
    /// Ranks are processes that mpirun starts, one per rank; requires --features mpi
    Mpi,
    /// Ranks are processes with a GPU each, that torchrun or mpirun starts; requires --features nccl
    Nccl,
}

/// How long ranks wait for each other: `--timeout` of the programs.
///
/// There is no limit for work of rank 0 alone, for example a run on one device, while its process lives.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub struct Patience {
    /// Seconds that a rank waits for another one before the run fails [default: 60 until all processes have connected,
    /// then 600; no limit for work of rank 0 alone while it lives]
    #[arg(long, value_name = "SECONDS", help_heading = "Ranks")]
    timeout: Option<u64>,
    /// Seconds of silence after which a process counts as lost, for ranks that are processes [default: 10]
    #[arg(long, value_name = "SECONDS", help_heading = "Ranks")]
    lost_after: Option<u64>,
}

/// The largest value: a year.
const MOST_SECONDS: u64 = 365 * 24 * 60 * 60;

impl Patience {
    /// The same number of seconds in every phase.
    pub fn seconds(seconds: u64) -> Self {
        Self { timeout: Some(seconds), ..Self::default() }
    }

    /// Returns the limit until all processes have connected.
    pub(super) fn to_meet(self) -> Duration {
        Duration::from_secs(self.timeout.unwrap_or(60))
    }

    /// Returns the limit of one call.
    pub(super) fn in_call(self) -> Duration {
        Duration::from_secs(self.timeout.unwrap_or(600))
    }

    /// Returns the time of silence after which a process counts as lost.
    pub(super) fn lost_after(self) -> Duration {
        Duration::from_secs(self.lost_after.unwrap_or(10))
    }

    fn check(self, backend: BackendName) -> Checked {
        for (flag, seconds) in [("--timeout", self.timeout), ("--lost-after", self.lost_after)] {
            let Some(seconds) = seconds else { continue };
            require!(seconds > 0, "{flag} is 0: give at least 1.");
            require!(seconds <= MOST_SECONDS, "{flag} {seconds} is too long: give at most {MOST_SECONDS}.");
        }
        require!(
            self.lost_after.is_none() || backend != BackendName::Threads,
            "--lost-after is for ranks that are processes: give --backend mpi or nccl, or leave it out."
        );
        Ok(())
    }
}

/// How exact matrix products on GPUs are: `--tf32` of the programs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Args)]
pub struct ProductPrecision {
    /// On GPUs, round the operands of f32 products to the 10 bits of TF32, which tensor cores multiply; sums stay f32
    #[arg(long, help_heading = "Ranks")]
    tf32: bool,
}

impl ProductPrecision {
    /// What a report says of products, behind a sentence.
    pub fn said(self) -> &'static str {
        if self.tf32 { "; products in TF32" } else { "" }
    }

    /// Makes products of this process so exact.
    fn settle(self, backend: BackendName) -> Checked {
        require!(
            !self.tf32 || backend == BackendName::Nccl,
            "--tf32 is for products on GPUs: give --backend nccl, or leave it out."
        );
        if self.tf32 {
            set_gemm_reduced_precision_f32(true);
        }
        Ok(())
    }
}

/// The command line of a program that runs on any backend.
pub trait Launched: Parser + Sync {
    /// A part of the program that only runs on the CPU, if there is one.
    const CPU_ONLY: Option<&'static str> = None;

    /// Changes the definition of the command line for these arguments, for example of what the help shows.
    fn define(definition: clap::Command, _arguments: &[OsString]) -> clap::Command {
        definition
    }

    /// Checks which arguments are given.
    ///
    /// # Errors
    /// A sentence with the flag and a remedy.
    fn check_given(_matches: &ArgMatches) -> Checked {
        Ok(())
    }

    /// Returns the backend that moves tensors between ranks.
    fn backend(&self) -> BackendName;

    /// Compute threads of each rank, if the command line says so; otherwise the cores divided by the ranks of this machine, or
    /// those that a launcher has bound the rank to.
    fn threads(&self) -> Option<usize> {
        None
    }

    /// How long a rank waits for others before the run fails, if the command line says so.
    fn patience(&self) -> Patience;

    /// How exact matrix products on GPUs are, if the command line says so.
    fn precision(&self) -> ProductPrecision {
        ProductPrecision::default()
    }

    /// Returns, for each run on several ranks, the flags that set the number of ranks, and the number. Called before the
    /// checks too.
    fn ranks(&self) -> Vec<(String, usize)>;
}

/// Runs a program: parses the command line, checks it, and runs on the ranks. The exit status is 0 if it returns true,
/// else 1.
///
/// If ranks are processes, each calls `validate` and `program`, and all end with the same status.
pub fn start<A: Launched, V>(
    validate: impl Fn(&A) -> Checked<V> + Sync,
    program: impl Fn(&A, &V, &Ranks<'_>) -> anyhow::Result<bool> + Sync,
) -> ExitCode {
    let args: A = match cli::parse_by(A::define, A::check_given) {
        Ok(args) => args,
        Err(error) => {
            return processes::refuse(&error, std::env::args().any(|arg| arg.starts_with("--backend")));
        }
    };
    let patience = args.patience();
    let settled = patience.check(args.backend()).and_then(|()| args.precision().settle(args.backend()));
    if let Err(error) = settled {
        return processes::refuse(&error, args.backend() != BackendName::Threads);
    }
    let run = |ranks: &Ranks<'_>| {
        let fits = |made| ranks.check(&args.ranks()).map(|()| made);
        let made = ranks.agree(validate(&args).and_then(fits))?;
        program(&args, &made, ranks)
    };
    let threads = |default: fn(usize) -> usize, ranks| args.threads().unwrap_or_else(|| default(ranks));
    match args.backend() {
        BackendName::Threads => {
            // Before the first tensor op: computations outside of ranks must not have more threads than a rank.
            let most = args.ranks().into_iter().map(|(_, ranks)| ranks).max().unwrap_or(1);
            candle_dist::threads::settle(threads(candle_dist::threads::default_per_rank, most));
            cli::status(run(&Ranks::Threads(patience)))
        }
        name => match processes::started(name, A::CPU_ONLY) {
            Ok(launched) => {
                let of_process = |ranks| threads(candle_dist::threads::default_of_process, ranks);
                processes::join(&launched, of_process, patience, run)
            }
            Err(status) => status,
        },
    }
}
