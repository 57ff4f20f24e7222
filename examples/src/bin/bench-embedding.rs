//! Measures lookups in sharded tables, and steps that train them; see `--help`.

use std::process::ExitCode;

use examples::bench_embedding::args::Args;
use examples::bench_embedding::measure::{ROWS, measure};
use examples::{allocator, cli};

fn main() -> ExitCode {
    allocator::keep_pages();
    cli::run(Args::validate, run)
}

/// Measures and reports.
fn run(args: &Args) -> anyhow::Result<()> {
    cli::report(
        ROWS,
        args.json.as_deref(),
        |row| {
            measure(args, |sharding, limited, phase| {
                let limit = if limited { " with max_norm" } else { "" };
                row(format!("{}-wise{limit}, {}", sharding.as_str(), phase.as_str()));
            })
        },
        |report| report.table(),
    )
}
