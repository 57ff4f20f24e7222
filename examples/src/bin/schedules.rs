//! Draws pipeline schedules and prints their costs; see `--help`.

use std::io::Write;
use std::process::ExitCode;

use examples::cli::{self, Output, failed};
use examples::schedules::args::Args;
use examples::schedules::simulations::Simulations;
use examples::schedules::write;

fn main() -> ExitCode {
    let (args, mut simulations) = match cli::arguments(Simulations::new) {
        Ok(checked) => checked,
        Err(status) => return status,
    };
    match run(&args, &mut simulations) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => failed(&error),
    }
}

/// Writes all requested output.
fn run(args: &Args, simulations: &mut Simulations) -> anyhow::Result<()> {
    args.measure.map_or(Ok(()), |unit| simulations.measure(unit))?;
    let output = Output::new(args.json.as_deref());
    write::files(args, simulations)?;
    writeln!(output.screen(), "{}", simulations.text())?;
    output.write_json(&simulations.report())
}
