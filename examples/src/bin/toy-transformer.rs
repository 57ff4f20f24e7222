//! Trains a toy Transformer on one device and in parallel, and shows that they agree; see `--help`.

use std::io::Write;
use std::process::ExitCode;

use examples::allocator;
use examples::cli::Output;
use examples::launch::{self, Ranks};
use examples::toy_transformer::args::Args;
use examples::toy_transformer::corpus::Corpus;
use examples::toy_transformer::report::{self, Report};
use examples::toy_transformer::{runs, validate};

fn main() -> ExitCode {
    allocator::keep_pages();
    launch::start(validate::validate, run)
}

/// Makes all runs and reports on them; returns whether they agree.
fn run(args: &Args, corpus: &Corpus, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    let output = Output::new(args.json.as_deref());
    if ranks.is_first() {
        writeln!(output.screen(), "{}", report::heading(args, corpus))?;
    }
    let mut outcomes = Vec::new();
    for name in args.runs() {
        outcomes.extend(runs::run_one(name, args, corpus, ranks)?);
    }
    if !ranks.is_first() {
        return Ok(true);
    }
    let report = Report::new(&outcomes, args.tolerance)?;
    writeln!(output.screen(), "{}", report::summary(args, &report, &outcomes))?;
    output.write_json(&report)?;
    Ok(report.parity.ok)
}
