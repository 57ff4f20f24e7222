//! Draws pipeline schedules and prints their costs; see `--help`.

use std::io::Write;
use std::process::ExitCode;

use examples::cli::{self, Output, failed};
use examples::schedules::args::Args;
use examples::schedules::plan::Plan;
use examples::schedules::write;

fn main() -> ExitCode {
    let (args, mut plan) = match cli::arguments(Plan::new) {
        Ok(checked) => checked,
        Err(status) => return status,
    };
    match run(&args, &mut plan) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

/// Writes all requested output.
fn run(args: &Args, plan: &mut Plan) -> anyhow::Result<()> {
    args.measure.map_or(Ok(()), |unit| plan.measure(unit))?;
    let output = Output::new(args.json.as_deref());
    write::files(args, plan)?;
    writeln!(output.screen(), "{}", plan.text())?;
    output.write_json(&plan.report())
}
