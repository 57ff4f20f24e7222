//! Checks what needs a GPU, on one card; see `--help`, and `scripts/gpu-check.sh`, which runs it in all its ways.

use std::process::ExitCode;

use clap::Parser;
use examples::gpu::{Args, check};

fn main() -> ExitCode {
    match check(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => examples::cli::failed(&error),
    }
}
