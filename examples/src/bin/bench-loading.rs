//! Measures how fast a rank loads its shard of a weight, compared with candle; see `--help`.

use std::process::ExitCode;

use examples::bench_loading::args::Args;
use examples::bench_loading::measure::measure;
use examples::{allocator, cli};

fn main() -> ExitCode {
    allocator::keep_pages();
    cli::run(Args::validate, run)
}

/// Measures and reports.
fn run(args: &Args) -> anyhow::Result<()> {
    cli::report(
        2 * args.shapes.len(),
        args.json.as_deref(),
        |row| measure(args, |size, dim| row(format!("{size} on dim {dim}"))),
        |report| report.table(),
    )
}
