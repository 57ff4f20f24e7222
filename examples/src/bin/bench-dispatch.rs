//! Measures the time that a distributed op adds to the plain one; see `--help`.

use std::process::ExitCode;

use examples::bench_dispatch::args::Args;
use examples::bench_dispatch::measure::{measure, rows};
use examples::{allocator, cli};

fn main() -> ExitCode {
    allocator::keep_pages();
    cli::run(Args::validate, run)
}

/// Measures and reports.
fn run(args: &Args) -> anyhow::Result<()> {
    cli::report(
        rows(),
        args.json.as_deref(),
        |row| measure(args, |op, axes| row(format!("{op} on {axes} axes"))),
        |report| report.table(),
    )
}
