//! Runs the checks that need a GPU, on one card; see `--help`. `scripts/gpu-device.sh` runs it with each backend.

use std::process::ExitCode;

use clap::Parser;
use examples::gpu_check::{Args, check};

fn main() -> ExitCode {
    match check(&Args::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => examples::cli::failed(&error),
    }
}
