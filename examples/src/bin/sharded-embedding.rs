//! Trains a click-through model with sharded tables and on one device, and shows that they agree; see `--help`.

use std::io::Write;
use std::process::ExitCode;

use examples::allocator;
use examples::cli::{self, FAILED, Output, failed};
use examples::clicks::args::Args;
use examples::clicks::log::Log;
use examples::clicks::metrics::trivial_log_loss;
use examples::clicks::outcome::RunName;
use examples::clicks::report::{self, Report};
use examples::clicks::training::{held_out_clicks, train};

fn main() -> ExitCode {
    allocator::keep_pages();
    let args = match cli::arguments(Args::validate) {
        Ok((args, ())) => args,
        Err(status) => return status,
    };
    match run(&args) {
        Ok(report) if report.parity.ok => ExitCode::SUCCESS,
        Ok(_) => ExitCode::from(FAILED),
        Err(error) => failed(&error),
    }
}

/// Makes all runs and reports on them.
fn run(args: &Args) -> anyhow::Result<Report> {
    // Before the first tensor op: the log is made first, and must not have more threads than a rank.
    candle_dist::threads::settle(1);
    let output = Output::new(args.json.as_deref());
    let mut screen = output.screen();
    writeln!(screen, "{}", report::heading(args))?;
    let log = Log::new(args.seed)?;
    let outcomes = RunName::ALL.iter().map(|&name| train(name, args, &log)).collect::<anyhow::Result<Vec<_>>>()?;
    let report = Report::new(args, &outcomes, trivial_log_loss(&held_out_clicks(&log)?))?;
    writeln!(screen, "{}", report::summary(args, &report))?;
    output.write_json(&report)?;
    Ok(report)
}
