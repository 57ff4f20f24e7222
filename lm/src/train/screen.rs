//! What is told while a model learns.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_lm::train::job::Job;
use candle_lm::train::trainer::StepOutput;
use examples::cli::Output;
use examples::progress::Progress;
use serde::{Deserialize, Serialize};

use super::args::TrainArgs;

/// Lines that stay, a progress bar below them where stderr is a terminal, and the log.
pub(super) struct Screen {
    shown: Option<Shown>,
}

/// What rank 0 tells.
struct Shown {
    out: Box<dyn Write>,
    /// On the terminal that the lines go to, or to another than they do.
    bar: Option<Progress>,
    log: Option<Log>,
    every: usize,
    steps: usize,
    tokens: usize,
}

/// A line of the log.
#[derive(Serialize, Deserialize)]
struct Line {
    step: usize,
    loss: f64,
    grad_norm: f64,
    learning_rate: f64,
    seconds: f64,
    tokens_per_second: f64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
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
        let open = |path: &Path| {
            Log::open(path, job.start).map_err(|error| anyhow!("--log {}: {error:#}", path.display()))
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

    /// Begins the log. Not before the training has the folder of `--save`, since another one may write both.
    ///
    /// # Errors
    /// If the log cannot be written.
    pub(super) fn begin(&self) -> Result<()> {
        let log = self.shown.as_ref().and_then(|shown| shown.log.as_ref());
        log.map_or(Ok(()), Log::begin).context("--log")
    }

    /// Shows a step. The screen gets every `--log-every`-th step, the last step, and steps with a validation loss.
    ///
    /// # Errors
    /// If the log cannot be written.
    pub(super) fn step(&mut self, made: StepOutput) -> Result<()> {
        let Some(shown) = &mut self.shown else { return Ok(()) };
        let StepOutput { step, loss, grad_norm, rate, seconds, valid } = made;
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
            log.file.write_all((serde_json::to_string(&line)? + "\n").as_bytes()).context("--log")?;
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

/// Names that lead to streams of this program, which may go to a file that has other lines too.
const STREAMS: [&str; 4] = ["/dev/stdout", "/dev/stderr", "/dev/fd", "/proc/self/fd"];

/// The log, to which one training at a time writes.
struct Log {
    file: File,
    /// The bytes of it that stay, if it is a file of its own.
    kept: Option<u64>,
}

impl Log {
    /// Opens the log of a training that begins with step `start`, counted from 0. The steps before stay. Those that a training made
    /// behind its last checkpoint, before it stopped, are made again, so they are cut off when the training [begins](Self::begin), with a
    /// line that was not finished.
    fn open(path: &Path, start: usize) -> Result<Self> {
        let mut file = OpenOptions::new().create(true).read(true).append(true).open(path)?;
        if !file.metadata()?.is_file() || STREAMS.iter().any(|stream| path.starts_with(stream)) {
            return Ok(Self { file, kept: None });
        }
        if let Err(TryLockError::WouldBlock) = file.try_lock() {
            bail!("another training writes to it: give a file of its own");
        }
        let mut log = Vec::new();
        file.read_to_end(&mut log)?;
        ensure!(start > 0 || is_log(&log), "it is no log of a training, and would be lost: give a new file");
        Ok(Self { file, kept: Some(if start == 0 { 0 } else { kept(&log, start) as u64 }) })
    }

    fn begin(&self) -> Result<()> {
        Ok(self.kept.map_or(Ok(()), |kept| self.file.set_len(kept))?)
    }
}

/// Whether a training wrote a file, as its first line tells. An empty one is nobody's.
fn is_log(log: &[u8]) -> bool {
    let first = log.split(|&byte| byte == b'\n').next().unwrap_or_default();
    log.is_empty() || serde_json::from_slice::<Line>(first).is_ok()
}

/// Returns how many bytes of a log are lines of steps up to `start`, counted from 1, or of something else.
fn kept(log: &[u8], start: usize) -> usize {
    let mut kept = 0;
    for line in log.split_inclusive(|&byte| byte == b'\n') {
        let is_later = serde_json::from_slice::<Line>(line).is_ok_and(|line| line.step > start);
        if is_later || !line.ends_with(b"\n") {
            break;
        }
        kept += line.len();
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::{Line, is_log, kept};

    fn line(step: usize) -> String {
        let numbers = Line {
            step,
            loss: 2.5,
            grad_norm: 1.0,
            learning_rate: 1e-4,
            seconds: 0.5,
            tokens_per_second: 8.0,
            valid_loss: (step == 2).then_some(3.0),
        };
        serde_json::to_string(&numbers).expect("numbers") + "\n"
    }

    #[test]
    fn steps_that_are_made_again_are_cut_off_and_so_is_a_line_that_was_not_finished() {
        let steps = |range: std::ops::RangeInclusive<usize>| range.map(line).collect::<String>();
        let half = &line(4)[..20];
        for (log, start, left) in [
            (steps(1..=3), 3, steps(1..=3)),
            (steps(1..=5), 3, steps(1..=3)),
            (steps(1..=3) + half, 3, steps(1..=3)),
            (steps(1..=2) + half, 3, steps(1..=2)),
            ("a note\n".to_owned() + &steps(1..=5), 2, "a note\n".to_owned() + &steps(1..=2)),
            (String::new(), 3, String::new()),
            (half.to_owned(), 3, String::new()),
            (steps(4..=5), 3, String::new()),
        ] {
            assert_eq!(&log[..kept(log.as_bytes(), start)], left);
        }
    }

    #[test]
    fn only_what_a_training_wrote_is_a_log() {
        for (log, is) in [
            (String::new(), true),
            (line(1), true),
            (line(1) + "half", true),
            ("a note\n".to_owned() + &line(1), false),
            ("\n".to_owned(), false),
            ("{}\n".to_owned(), false),
        ] {
            assert_eq!(is_log(log.as_bytes()), is, "{log:?}");
        }
    }
}
