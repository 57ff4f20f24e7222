//! Measures the collectives of a local process group against what memory alone would cost; see `--help`.

use std::process::ExitCode;

use examples::collectives::args::Args;
use examples::collectives::measure::measure;
use examples::{allocator, cli};

fn main() -> ExitCode {
    allocator::keep_pages();
    cli::run(Args::validate, run)
}

/// Measures and reports.
fn run(args: &Args) -> anyhow::Result<()> {
    cli::report(
        args.ops.len() * args.sizes.len(),
        args.json.as_deref(),
        |row| measure(args, |op, size| row(format!("{op} of {size}"))),
        |report| report.table(),
    )
}
