//! What is told while a model learns.

use std::fs::{File, OpenOptions, TryLockError};
use std::io::{self, IsTerminal, Read, Write};
use std::path::Path;

use anyhow::{Context, Result, anyhow, bail, ensure};
use candle_lm::train::job::Job;
use candle_lm::train::metrics::flops_per_token_of;
use candle_lm::train::trainer::StepOutput;
use examples::cli::Output;
use examples::progress::Progress;
use examples::table::grouped;
use serde::{Deserialize, Serialize};

use super::args::TrainArgs;
use super::tensorboard::EventFile;

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
    events: Option<EventFile>,
    every: usize,
    steps: usize,
    tokens: usize,
    /// Floating-point operations of a step, and those of a second that all ranks can make.
    flops: f64,
    peak_flops: Option<f64>,
}

/// A line of the log. Numbers that are not finite are null, or not there.
#[derive(Default, Serialize, Deserialize)]
struct Line {
    step: usize,
    loss: Option<f64>,
    grad_norm: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    update_norm: Option<f64>,
    learning_rate: f64,
    seconds: f64,
    tokens_per_second: f64,
    #[serde(default)]
    tflops: f64,
    #[serde(skip_serializing_if = "Option::is_none")]
    utilization: Option<f64>,
    #[serde(default)]
    skipped: usize,
    #[serde(skip_serializing_if = "Option::is_none")]
    loss_scale: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    valid_loss: Option<f64>,
}

impl Line {
    /// The numbers of it that event files have, under names of groups that TensorBoard shows together.
    fn scalars(&self) -> Vec<(&'static str, f64)> {
        let all = [
            ("train/loss", self.loss),
            ("train/grad_norm", self.grad_norm),
            ("train/update_norm", self.update_norm),
            ("train/learning_rate", Some(self.learning_rate)),
            ("train/skipped", Some(self.skipped as f64)),
            ("train/loss_scale", self.loss_scale),
            ("valid/loss", self.valid_loss),
            ("speed/seconds", Some(self.seconds)),
            ("speed/tokens_per_second", Some(self.tokens_per_second)),
            ("speed/tflops", Some(self.tflops)),
            ("speed/utilization", self.utilization),
        ];
        all.into_iter().filter_map(|(name, number)| Some((name, number?))).collect()
    }
}

impl Screen {
    /// The screen of a rank; those that are not the first tell nothing.
    ///
    /// # Errors
    /// If the log cannot be opened; those of [`flops_per_token_of`].
    pub(super) fn new(rank: usize, job: &Job, output: Output<'_>, flags: &TrainArgs) -> Result<Self> {
        if rank != 0 {
            return Ok(Self { shown: None });
        }
        let open = |path: &Path| {
            // A step that is shown again has its line anew.
            let start = job.start - usize::from(job.unvalidated().is_some());
            Log::open(path, start).map_err(|error| anyhow!("--log {}: {error:#}", path.display()))
        };
        let tokens = job.recipe.batch * job.recipe.seq_len;
        let shown = job.steps().len() + usize::from(job.unvalidated().is_some());
        let bar = || Progress::with_details("train", shown);
        Ok(Self {
            shown: Some(Shown {
                out: output.screen(),
                bar: io::stderr().is_terminal().then(bar),
                log: flags.log.as_deref().map(open).transpose()?,
                events: None,
                every: flags.log_every,
                steps: job.recipe.rate.steps,
                tokens,
                flops: tokens as f64 * flops_per_token_of(job)?,
                peak_flops: flags.peak_tflops.map(|peak| peak * 1e12),
            }),
        })
    }

    /// Begins the log and the event file. Not before the training has the folder of `--save`, since another one may write both.
    ///
    /// # Errors
    /// If the log cannot be written.
    pub(super) fn begin(&mut self, job: &Job, flags: &TrainArgs) -> Result<()> {
        let Some(shown) = &mut self.shown else { return Ok(()) };
        shown.log.as_ref().map_or(Ok(()), Log::begin).context("--log")?;
        let create = |folder: &Path| {
            EventFile::create(folder, job.start + usize::from(job.unvalidated().is_none()))
                .with_context(|| format!("--tensorboard {}", folder.display()))
        };
        shown.events = flags.tensorboard.as_deref().map(create).transpose()?;
        Ok(())
    }

    /// Shows a step. The screen gets every `--log-every`-th step, the last step, and steps with a validation loss.
    ///
    /// # Errors
    /// If the log or the event file cannot be written.
    pub(super) fn step(&mut self, made: StepOutput) -> Result<()> {
        let Some(shown) = &mut self.shown else { return Ok(()) };
        let StepOutput { step, loss, grad_norm, rate, seconds, valid, skipped, .. } = made;
        let number = step + 1;
        let is_finite = |number: &f64| number.is_finite();
        let per_second = |count: f64| if seconds > 0.0 { count / seconds } else { 0.0 };
        let flops = per_second(shown.flops);
        let line = Line {
            step: number,
            loss: Some(loss).filter(is_finite),
            grad_norm: Some(grad_norm).filter(is_finite),
            update_norm: made.update_norm.filter(is_finite),
            learning_rate: rate,
            seconds,
            tokens_per_second: per_second(shown.tokens as f64),
            tflops: flops / 1e12,
            utilization: shown.peak_flops.map(|peak| flops / peak),
            skipped,
            loss_scale: made.loss_scale,
            valid_loss: valid.filter(is_finite),
        };
        if number.is_multiple_of(shown.every) || number == shown.steps || valid.is_some() {
            let valid = valid.map(|loss| format!(", of --valid {loss:.4}")).unwrap_or_default();
            let skipped = match skipped {
                0 => String::new(),
                count => format!(", {count} steps left out"),
            };
            let line = format!(
                "step {number} of {}: loss {loss:.4}{valid}, gradient norm {grad_norm:.3}, learning rate {rate:.2e}{skipped}",
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
            let speed = grouped(line.tokens_per_second as usize);
            bar.tell_step(format!("loss {loss:.3}, norm {grad_norm:.2}, rate {rate:.2e}, {speed} tokens/s"));
        }
        if let Some(log) = &mut shown.log {
            log.file.write_all((serde_json::to_string(&line)? + "\n").as_bytes()).context("--log")?;
        }
        if let Some(events) = &mut shown.events {
            events.scalars(number, &line.scalars()).context("--tensorboard")?;
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
            // Of a step that was left out.
            loss: (step != 3).then_some(2.5),
            grad_norm: Some(1.0),
            learning_rate: 1e-4,
            seconds: 0.5,
            tokens_per_second: 8.0,
            valid_loss: (step == 2).then_some(3.0),
            ..Line::default()
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
