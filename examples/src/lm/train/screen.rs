//! What is told while a model learns.

use std::fs::{File, OpenOptions};
use std::io::{self, IsTerminal, Write};

use anyhow::{Context, Result};
use serde::Serialize;

use super::args::TrainArgs;
use super::job::Job;
use super::trainer::Made;
use crate::cli::Output;
use crate::progress::Progress;

/// Lines that stay, a progress bar below them where stderr is a terminal, and the log.
pub(super) struct Screen {
    shown: Option<Shown>,
}

/// What rank 0 tells.
struct Shown {
    out: Box<dyn Write>,
    /// On the terminal that the lines go to, or to another than they do.
    bar: Option<Progress>,
    log: Option<File>,
    every: usize,
    steps: usize,
    tokens: usize,
}

/// A line of the log.
#[derive(Serialize)]
struct Line {
    step: usize,
    loss: f64,
    grad_norm: f64,
    learning_rate: f64,
    seconds: f64,
    tokens_per_second: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    valid_loss: Option<f64>,
}

impl Screen {
    /// The screen of a rank; those that are not the first tell nothing.
    ///
    /// # Errors
    /// If the log cannot be opened.
    pub(super) fn new(rank: usize, job: &Job, output: Output<'_>, flags: &TrainArgs) -> Result<Self> {
        if rank != 0 {
            return Ok(Self { shown: None });
        }
        let open = |path| {
            let mut options = OpenOptions::new();
            // What a training goes on with stays.
            options.create(true).write(true).append(job.start > 0).truncate(job.start == 0);
            options.open(path).with_context(|| format!("--log {}", std::path::Path::display(path)))
        };
        Ok(Self {
            shown: Some(Shown {
                out: output.screen(),
                bar: io::stderr().is_terminal().then(|| Progress::new("train", job.steps().len())),
                log: flags.log.as_deref().map(open).transpose()?,
                every: flags.log_every,
                steps: job.recipe.rate.steps,
                tokens: job.recipe.batch * job.recipe.seq_len,
            }),
        })
    }

    /// Shows a step. The screen gets every `--log-every`-th step, the last step, and steps with a validation loss.
    ///
    /// # Errors
    /// If the log cannot be written.
    pub(super) fn step(&mut self, made: Made) -> Result<()> {
        let Some(shown) = &mut self.shown else { return Ok(()) };
        let Made { step, loss, grad_norm, rate, seconds, valid } = made;
        let number = step + 1;
        if number.is_multiple_of(shown.every) || number == shown.steps || valid.is_some() {
            let valid = valid.map(|loss| format!(", of --valid {loss:.4}")).unwrap_or_default();
            let line = format!(
                "step {number} of {}: loss {loss:.4}{valid}, gradient norm {grad_norm:.3}, learning rate {rate:.2e}",
                shown.steps
            );
            // A reader that stopped misses the rest; the ranks go on together.
            let mut tell = || drop(writeln!(shown.out, "{line}"));
            match &shown.bar {
                Some(bar) => bar.above(tell),
                None => tell(),
            }
        }
        if let Some(bar) = &shown.bar {
            bar.step(loss);
        }
        if let Some(log) = &mut shown.log {
            let tokens_per_second = if seconds > 0.0 { shown.tokens as f64 / seconds } else { 0.0 };
            let line = Line {
                step: number,
                loss,
                grad_norm,
                learning_rate: rate,
                seconds,
                tokens_per_second,
                valid_loss: valid,
            };
            writeln!(log, "{}", serde_json::to_string(&line)?).context("--log")?;
        }
        Ok(())
    }

    /// Takes the bar off the screen.
    pub(super) fn finish(&self) {
        if let Some(bar) = self.shown.as_ref().and_then(|shown| shown.bar.as_ref()) {
            bar.finish();
        }
    }
}
