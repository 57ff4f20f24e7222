//! Writes the requested files.

use std::fs;

use candle_pipe::schedule::draw;

use super::args::Args;
use super::plan::Plan;

/// Writes the pictures and the schedule.
///
/// # Errors
/// If a file cannot be written.
pub fn files(args: &Args, plan: &Plan) -> anyhow::Result<()> {
    let timelines = plan.timelines();
    if let Some(path) = &args.svg {
        fs::write(path, draw::svg(&timelines))?;
    }
    if let Some(path) = &args.trace {
        draw::save_chrome(path, &timelines)?;
    }
    if let (Some(path), [entry]) = (&args.csv, &plan.entries[..]) {
        fs::write(path, entry.schedule.to_csv())?;
    }
    Ok(())
}
