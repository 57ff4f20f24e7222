//! Measures how a rank loads its shard of a weight, against candle; see `--help`.

use std::io::Write;
use std::process::ExitCode;

use clap::Parser;
use examples::allocator;
use examples::cli::{Output, USAGE, fail, failed, one_sentence};
use examples::loading::args::Args;
use examples::loading::measure::measure;
use indicatif::{ProgressBar, ProgressStyle};

fn main() -> ExitCode {
    allocator::keep_pages();
    let args = match Args::try_parse() {
        Ok(args) => args,
        Err(error) if error.use_stderr() => return fail(one_sentence(&error), USAGE),
        Err(help) => help.exit(),
    };
    if let Err(error) = args.validate() {
        return fail(error, USAGE);
    }
    match run(&args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

/// Measures and reports.
fn run(args: &Args) -> anyhow::Result<()> {
    let style = ProgressStyle::with_template("{bar:32} {pos}/{len} rows, {msg} [{elapsed}]")?;
    // Drawn on stderr, and only where that is a terminal.
    let bar = ProgressBar::new(2 * args.shapes.len() as u64).with_style(style);
    let report = measure(args, |size, dim| {
        bar.set_message(format!("{size} on dim {dim}"));
        bar.inc(1);
    });
    bar.finish_and_clear();
    let (report, output) = (report?, Output::new(args.json.as_deref()));
    writeln!(output.screen(), "{}", report.table())?;
    output.write_json(&report)
}
