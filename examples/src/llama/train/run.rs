//! The program that trains.

use std::io::Write;
use std::path::Path;

use super::folder;
use super::job::Job;
use super::report::Report;
use super::screen::Screen;
use super::trainer::train;
use crate::cli::Output;
use crate::launch::{Ranks, gather};
use crate::llama::args::Args;

/// Trains on `text` and tells how it went.
///
/// # Errors
/// Those of [`Job::open`] and of [`train`].
pub fn run(args: &Args, text: &Path, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    let scratch = tempfile::tempdir()?;
    let job = ranks.agree(Job::open(args, text, scratch.path()))?;
    let output = Output::new(args.json.as_deref());
    let trained = ranks.run(job.pipeline.world(), args.threads, |ctx| {
        let mut screen = Screen::new(ctx.rank(), &job, output, args.training.log_every);
        let trained = train(ctx, &job, |made| screen.step(made))?;
        screen.finish();
        gather(ctx.group(), trained)
    })?;
    let Some(trained) = trained.flatten() else { return Ok(true) };
    let report = Report::new(&job, &trained);
    writeln!(output.screen(), "{report}")?;
    if let Some((save, _)) = &job.save {
        writeln!(output.screen(), "Saved to {}.", folder::of_step(save, job.recipe.rate.steps).display())?;
    }
    output.write_json(&report)?;
    Ok(true)
}
