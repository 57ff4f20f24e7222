//! Measures attention of a sequence that is cut over ranks; see `--help`.

use std::process::ExitCode;

use examples::bench_attention::args::Args;
use examples::bench_attention::measure::measure;
use examples::{allocator, cli};

fn main() -> ExitCode {
    allocator::keep_pages();
    cli::run(Args::validate, run)
}

/// Measures and reports.
fn run(args: &Args) -> anyhow::Result<()> {
    cli::report(
        1,
        args.json.as_deref(),
        |row| {
            row(format!("{} of {} tokens", args.way, args.length));
            measure(args)
        },
        |report| report.table(),
    )
}
