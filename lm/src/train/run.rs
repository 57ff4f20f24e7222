//! The program that trains.

use std::io::Write;

use anyhow::Context;
use candle_dist::RankContext;
use candle_lm::train::data::TrainingData;
use candle_lm::train::folder;
use candle_lm::train::job::Job;
use candle_lm::train::recipe::LocalRecipe;
use candle_lm::train::trainer::{TrainEnd, train};
use examples::cli::{self, Output};
use examples::launch::{ProductPrecision, Ranks, StopSignal, gather};
use examples::memory;
use examples::progress::Loading;
use examples::table::grouped;

use super::job;
use super::report::Report;
use super::resume::open_together;
use super::screen::Screen;
use crate::args::Args;
use crate::input::agree;

/// Trains and tells how it went.
///
/// # Errors
/// Those of [`open_together`], of [`job::after`] and of [`train`].
pub fn run(args: &Args, ranks: &Ranks<'_>) -> anyhow::Result<bool> {
    let scratch = tempfile::tempdir()?;
    let resume = args.training.resume.as_deref();
    let resumed = resume
        .map(|path| open_together(path, args.model.as_deref(), &args.ignore_field, ranks))
        .transpose()?;
    let mut job = agree(ranks, job::after(resumed, args, scratch.path()))?;
    let signal = StopSignal::await_first().context("signals cannot be watched")?;
    job.stop = signal.flag();
    let output = Output::new(args.json.as_deref());
    if ranks.is_first() {
        job.notes.iter().for_each(|note| cli::tell("note", format_args!("{note}.")));
        // A closed screen does not stop the training.
        writeln!(output.screen(), "{}", heading(&job, args.precision)?).ok();
    }
    let learn = |ctx: &RankContext, loading: &Loading| {
        let mut screen = Screen::new(ctx.rank(), &job, output, &args.training)?;
        let trained = train(ctx, &job, |made| match made {
            Some(made) => screen.step(made),
            None => {
                screen.begin(&job, &args.training)?;
                if ctx.rank() == 0 {
                    loading.finish();
                }
                Ok(())
            }
        })?;
        screen.finish();
        gather(ctx.group(), (trained, memory::peak()))
    };
    let files = &job.files;
    let trained = Loading::watch(
        ranks.is_first(),
        files.bytes(),
        || files.bytes_read(),
        |loading| ranks.run(job.pipeline.world(), |ctx| learn(ctx, loading)),
    )?;
    let Some(trained) = trained.flatten() else { return Ok(true) };
    let report = Report::new(&job, args.training.peak_tflops, &trained)?;
    writeln!(output.screen(), "{report}")?;
    let steps = job.start + report.losses.len();
    match report.end {
        TrainEnd::Steps => {}
        TrainEnd::Patience => {
            writeln!(output.screen(), "Ended after step {steps}: the loss of --valid falls no more.")?;
        }
        TrainEnd::Signal => {
            let advice =
                if job.save.is_some() { "--resume goes on" } else { "nothing is saved without --save" };
            writeln!(output.screen(), "Stopped by a signal after step {steps}: {advice}.")?;
        }
    }
    if let Some((save, _)) = &job.save {
        writeln!(output.screen(), "Saved to {}.", folder::of_step(save, steps).display())?;
    }
    output.write_json(&report)?;
    Ok(true)
}

/// What is about to be done.
fn heading(job: &Job, precision: ProductPrecision) -> candle_pipe::Result<String> {
    let (recipe, pipeline) = (&job.recipe, job.pipeline);
    let mut lines = vec![format!(
        "{}, {} sequences of {} tokens in each step, in {}{}",
        described(&job.text),
        recipe.batch,
        recipe.seq_len,
        recipe.dtype,
        precision.said()
    )];
    if let Some(LocalRecipe { steps, replicas, .. }) = recipe.local {
        lines.push(format!(
            "{replicas} replicas train apart and meet every {steps} steps; the loss and the gradient norm of a step are those of the \
             first one"
        ));
    }
    if let Some((text, _)) = &job.valid {
        lines.push(format!("{} whose loss is told", described(text)));
    }
    if let Some(end) = recipe.rate.ended {
        let rate = recipe.rate.at(end);
        lines.push(format!(
            "the learning rate stays at {rate:.2e}, to which it fell in {end} steps; --decay lets it fall anew"
        ));
    }
    if pipeline.pp > 1 {
        let (stages, parts, idle) = (pipeline.stages(), pipeline.microbatches, 100.0 * pipeline.bubble()?);
        lines.push(format!(
            "{stages} stages, {parts} microbatches: about {idle:.0} % of the ranks' time is idle"
        ));
    }
    Ok(lines.join("\n"))
}

/// What is learned, or has a loss.
fn described(text: &TrainingData) -> String {
    let tokens = grouped(text.tokens());
    match text {
        TrainingData::Text(_) => format!("{tokens} tokens of text"),
        TrainingData::Documents(set) if set.has_preferences() => format!(
            "{} pairs of answers of {tokens} tokens, of which {} are predicted",
            grouped(set.sequences()),
            grouped(set.counted())
        ),
        TrainingData::Documents(set) => format!(
            "{} records of {tokens} tokens, of which {} are predicted, in {} sequences",
            grouped(set.documents()),
            grouped(set.counted()),
            grouped(set.sequences())
        ),
    }
}
