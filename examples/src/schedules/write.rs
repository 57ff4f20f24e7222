//! Writes the requested files.

use std::fs;

use candle_pipe::schedule::draw;

use super::args::Args;
use super::simulations::Simulations;

/// Writes the pictures and the schedule.
///
/// # Errors
/// If a file cannot be written.
pub fn files(args: &Args, simulations: &Simulations) -> anyhow::Result<()> {
    let timelines = simulations.timelines();
    if let Some(path) = &args.svg {
        fs::write(path, draw::svg(&timelines))?;
    }
    if let Some(path) = &args.trace {
        draw::save_chrome(path, &timelines)?;
    }
    if let (Some(path), [simulation]) = (&args.csv, &simulations.all[..]) {
        fs::write(path, simulation.schedule.to_csv())?;
    }
    Ok(())
}
