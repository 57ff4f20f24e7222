//! Trains a click-through model with sharded tables and on one device, and shows that they agree; see `--help`.

use std::io::Write;
use std::process::ExitCode;

use examples::allocator;
use examples::cli::Output;
use examples::launch::{self, Ranks};
use examples::sharded_embedding::args::Args;
use examples::sharded_embedding::log::Log;
use examples::sharded_embedding::metrics::trivial_log_loss;
use examples::sharded_embedding::outcome::RunName;
use examples::sharded_embedding::report::{self, Report};
use examples::sharded_embedding::training::{held_out_clicks, train};

fn main() -> ExitCode {
    allocator::keep_pages();
    launch::start(Args::validate, |args, (), ranks| run(args, ranks))
}

/// Makes all runs and reports on them; returns whether they agree.
fn run(args: &Args, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    let output = Output::new(args.json.as_deref());
    if ranks.is_first() {
        writeln!(output.screen(), "{}", report::heading(args))?;
    }
    let log = Log::new(args.seed)?;
    let mut outcomes = Vec::new();
    for name in RunName::ALL {
        outcomes.extend(train(name, args, &log, ranks)?);
    }
    if !ranks.is_first() {
        return Ok(true);
    }
    let report = Report::new(args, &outcomes, trivial_log_loss(&held_out_clicks(&log)?))?;
    writeln!(output.screen(), "{}", report::summary(args, &report))?;
    output.write_json(&report)?;
    Ok(report.parity.ok)
}
