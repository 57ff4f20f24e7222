//! The same program on every engine: its ranks are threads of this process, or processes that a launcher started.

mod gather;
mod processes;
mod ranks;
mod voice;

use std::process::ExitCode;

use clap::{Parser, ValueEnum};
use serde::Serialize;

pub use gather::{Bits, agreed, gather};
pub(crate) use processes::is_first;
pub use ranks::Ranks;

use crate::cli::{self, Checked};

/// What moves tensors between ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum BackendName {
    /// Ranks are threads of this process
    Local,
    /// Ranks are processes that mpirun starts: one for each rank; needs --features mpi
    Mpi,
    /// Ranks are processes with a GPU each, that torchrun or mpirun starts; needs --features nccl
    Nccl,
}

/// A command line of a program that runs on any engine.
pub trait Launched: Parser + Sync {
    /// What of the program only the CPU can do, if something is.
    const CPU_ONLY: Option<&'static str> = None;

    /// What moves tensors between ranks.
    fn backend(&self) -> BackendName;

    /// Compute threads of each rank.
    fn threads(&self) -> usize;

    /// For each run on several ranks, the flags that decide how many, and how many; asked once the flags are checked.
    fn ranks(&self) -> Vec<(String, usize)>;
}

/// A program: parses the command line, checks it, and runs on the ranks; its status is 0 if it returns true, else 1.
///
/// Where ranks are processes, each calls `validate` and `program`, and all end with the same status.
pub fn start<A: Launched, V>(
    validate: impl Fn(&A) -> Checked<V> + Sync,
    program: impl Fn(&A, &V, &Ranks<'_>) -> anyhow::Result<bool> + Sync,
) -> ExitCode {
    let args: A = match cli::parse() {
        Ok(args) => args,
        Err(error) => return processes::refuse(&error, std::env::args().any(|arg| arg.starts_with("--backend"))),
    };
    let run = |ranks: &Ranks<'_>| {
        let fits = |made| ranks.check(&args.ranks()).map(|()| made);
        let made = ranks.agree(validate(&args).and_then(fits))?;
        program(&args, &made, ranks)
    };
    match args.backend() {
        BackendName::Local => {
            // Before the first tensor op: what is computed outside of ranks must not have more threads than a rank.
            candle_dist::threads::settle(args.threads());
            cli::status(run(&Ranks::Threads))
        }
        name => match processes::check(name, A::CPU_ONLY) {
            Ok(launched) => processes::join(&launched, args.threads(), run),
            Err(error) => processes::refuse(&error, true),
        },
    }
}
