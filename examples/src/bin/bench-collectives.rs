//! Measures the collectives of a process group and compares them with plain copies of memory; see `--help`.

use std::process::ExitCode;

use examples::bench_collectives::args::Args;
use examples::bench_collectives::measure::measure;
use examples::launch::{self, Ranks};
use examples::{allocator, cli};

fn main() -> ExitCode {
    allocator::keep_pages();
    launch::start(Args::validate, |args, (), ranks| run(args, ranks))
}

/// Measures and reports.
fn run(args: &Args, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    let rows = args.ops.len() * args.sizes.len();
    let measured = cli::watched(rows, |row| measure(args, ranks, |op, size| row(format!("{op} of {size}"))))?;
    if let Some(report) = measured {
        cli::show(args.json.as_deref(), &report, |report| report.table())?;
    }
    Ok(true)
}
