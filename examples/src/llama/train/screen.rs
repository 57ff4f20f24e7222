//! What is shown while a model learns.

use std::io::{self, IsTerminal, Write};

use super::job::Job;
use super::trainer::Made;
use crate::cli::Output;
use crate::progress::Progress;

/// A bar on stderr, or, where that is no terminal, a line each so many steps.
pub(super) enum Screen {
    /// A bar.
    Bar(Progress),
    /// Lines.
    Lines { out: Box<dyn Write>, every: usize, steps: usize },
    /// Nothing, for the ranks that leave it to rank 0.
    Dark,
}

impl Screen {
    /// The screen of a rank.
    pub(super) fn new(rank: usize, job: &Job, output: Output<'_>, every: usize) -> Self {
        match rank {
            0 if io::stderr().is_terminal() => Self::Bar(Progress::new("train", job.steps().len())),
            0 => Self::Lines { out: output.screen(), every, steps: job.recipe.rate.steps },
            _ => Self::Dark,
        }
    }

    /// Shows a step; the last one always.
    pub(super) fn step(&mut self, made: Made) {
        match self {
            Self::Bar(progress) => progress.step(made.loss),
            Self::Lines { out, every, steps } => {
                let number = made.step + 1;
                if number.is_multiple_of(*every) || number == *steps {
                    // Whoever stopped reading misses the rest; the ranks go on together.
                    let _ = writeln!(
                        out,
                        "step {number} of {steps}: loss {:.4}, learning rate {:.2e}",
                        made.loss, made.rate
                    );
                }
            }
            Self::Dark => {}
        }
    }

    /// Takes the bar off the screen.
    pub(super) fn finish(&self) {
        if let Self::Bar(progress) = self {
            progress.finish();
        }
    }
}
