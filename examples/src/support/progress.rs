//! A progress bar on stderr.

use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// The progress of one run. It is drawn only if stderr is a terminal.
#[derive(Clone, Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// Creates a bar for `steps` steps of the run `name`.
    pub fn new(name: &'static str, steps: usize) -> Self {
        let style = ProgressStyle::with_template(
            "{prefix:11} {bar:32} {pos}/{len} steps, {msg} [{elapsed}, {eta} left]",
        )
        .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::new(steps as u64).with_style(style).with_prefix(name);
        bar.set_message("starting");
        Self(bar)
    }

    /// Creates no bar, for the ranks other than rank 0.
    pub fn silent() -> Self {
        Self(ProgressBar::hidden())
    }

    /// Creates a bar with the time that is left in front of the message, which may be long.
    pub fn with_details(name: &'static str, steps: usize) -> Self {
        let style =
            ProgressStyle::with_template("{prefix} {bar:16} {pos}/{len} [{elapsed}, {eta} left] {msg}");
        let Self(bar) = Self::new(name, steps);
        Self(bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar())))
    }

    /// Counts one more step, and shows its loss.
    pub fn step(&self, loss: f64) {
        self.tell_step(format!("loss {loss:.3}"));
    }

    /// Counts one more step, and shows a message about it.
    pub fn tell_step(&self, message: String) {
        self.0.set_message(message);
        self.0.inc(1);
    }

    /// Hides the bar while `tell` writes whole lines.
    pub fn above(&self, tell: impl FnOnce()) {
        self.0.suspend(tell);
    }

    /// Removes the bar; the report has all its numbers.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// How often the bar of a model that is being read is drawn.
const TICK: Duration = Duration::from_millis(100);

/// A bar for the bytes that were read of a model. It is drawn only if stderr is a terminal.
#[derive(Debug)]
pub struct Loading(ProgressBar);

impl Loading {
    /// Calls `f` while a bar for `bytes` bytes follows `read`. The bar is drawn only if `is_shown`.
    pub fn watch<R>(
        is_shown: bool,
        bytes: u64,
        read: impl Fn() -> u64 + Sync,
        f: impl FnOnce(&Self) -> R,
    ) -> R {
        let style = ProgressStyle::with_template("{prefix:11} {bar:32} {bytes} of {total_bytes} [{elapsed}]")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = if is_shown { ProgressBar::new(bytes) } else { ProgressBar::hidden() };
        let loading = Self(bar.with_style(style).with_prefix("reading"));
        thread::scope(|scope| {
            let follow = || {
                while !loading.0.is_finished() {
                    // Ranks that hold the same parameters read them more than once.
                    loading.0.set_position(read().min(bytes));
                    thread::sleep(TICK);
                }
            };
            // Without a thread for it there is no bar.
            if thread::Builder::new().spawn_scoped(scope, follow).is_err() {
                loading.finish();
            }
            // The watcher ends with the bar, even if `f` panics.
            let _ends = Ends(&loading);
            f(&loading)
        })
    }

    /// Removes the bar.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// Removes the bar when it is dropped.
struct Ends<'a>(&'a Loading);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.finish();
    }
}
