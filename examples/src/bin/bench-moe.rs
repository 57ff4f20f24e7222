//! Measures a mixture of experts that is distributed over ranks; see `--help`.

use std::process::ExitCode;

use examples::bench_moe::args::Args;
use examples::bench_moe::measure::measure;
use examples::{allocator, cli};

fn main() -> ExitCode {
    allocator::keep_pages();
    cli::run(Args::validate, run)
}

/// Measures and reports.
fn run(args: &Args) -> anyhow::Result<()> {
    cli::report(
        args.routings().len(),
        args.json.as_deref(),
        |row| measure(args, |routing| row(format!("{routing} routing"))),
        |report| report.table(),
    )
}
