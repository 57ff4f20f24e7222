//! Trains a toy Transformer on one device and in parallel, and shows that they agree; see `--help`.

use std::io::Write;
use std::process::ExitCode;

use examples::allocator;
use examples::cli::{self, FAILED, Output, failed};
use examples::toy::args::Args;
use examples::toy::corpus::Corpus;
use examples::toy::report::{self, Report};
use examples::toy::{runs, validate};

fn main() -> ExitCode {
    allocator::keep_pages();
    let (args, corpus) = match cli::arguments(validate::validate) {
        Ok(checked) => checked,
        Err(status) => return status,
    };
    // Before the first tensor op: the run on one device comes first, and must not have more threads than a rank.
    candle_dist::threads::settle(args.threads);
    match run(&args, &corpus) {
        Ok(report) if report.parity.ok => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(FAILED),
        Err(error) => failed(&error),
    }
}

/// Makes all runs and reports on them.
fn run(args: &Args, corpus: &Corpus) -> anyhow::Result<Report> {
    let output = Output::new(args.json.as_deref());
    let mut screen = output.screen();
    writeln!(screen, "{}", report::heading(args, corpus))?;
    let outcomes =
        args.runs().into_iter().map(|name| runs::run_one(name, args, corpus)).collect::<anyhow::Result<Vec<_>>>()?;
    let report = Report::new(&outcomes, args.tolerance)?;
    writeln!(screen, "{}", report::summary(args, &report, &outcomes))?;
    output.write_json(&report)?;
    Ok(report)
}
