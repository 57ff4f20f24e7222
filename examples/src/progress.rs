//! A progress bar on stderr.

use std::thread;
use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};

/// The progress of one run; nothing is drawn where stderr is not a terminal.
#[derive(Clone, Debug)]
pub struct Progress(ProgressBar);

impl Progress {
    /// A bar for `steps` steps of the run `name`.
    pub fn new(name: &'static str, steps: usize) -> Self {
        let style =
            ProgressStyle::with_template("{prefix:11} {bar:32} {pos}/{len} steps, {msg} [{elapsed}, {eta} left]")
                .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = ProgressBar::new(steps as u64).with_style(style).with_prefix(name);
        bar.set_message("starting");
        Self(bar)
    }

    /// No bar at all, for the ranks that leave it to rank 0.
    pub fn silent() -> Self {
        Self(ProgressBar::hidden())
    }

    /// One more step is done, and had this loss.
    pub fn step(&self, loss: f64) {
        self.0.set_message(format!("loss {loss:.3}"));
        self.0.inc(1);
    }

    /// Calls `tell`, which writes whole lines, while the bar is off the screen.
    pub fn above(&self, tell: impl FnOnce()) {
        self.0.suspend(tell);
    }

    /// Takes the bar off the screen; the report says all it had to say.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// How often the bar of a model that is being read moves.
const TICK: Duration = Duration::from_millis(100);

/// The bytes of a model that were read, as a bar on stderr; nothing is drawn where stderr is not a terminal.
#[derive(Debug)]
pub struct Loading(ProgressBar);

impl Loading {
    /// Calls `f` with a bar for `bytes` bytes, which follows `read` until it is finished; only drawn where `is_shown`.
    pub fn watch<R>(is_shown: bool, bytes: u64, read: impl Fn() -> u64 + Sync, f: impl FnOnce(&Self) -> R) -> R {
        let style = ProgressStyle::with_template("{prefix:11} {bar:32} {bytes} of {total_bytes} [{elapsed}]")
            .unwrap_or_else(|_| ProgressStyle::default_bar());
        let bar = if is_shown { ProgressBar::new(bytes) } else { ProgressBar::hidden() };
        let loading = Self(bar.with_style(style).with_prefix("reading"));
        thread::scope(|scope| {
            scope.spawn(|| {
                while !loading.0.is_finished() {
                    // Ranks that hold the same parameters read them more than once.
                    loading.0.set_position(read().min(bytes));
                    thread::sleep(TICK);
                }
            });
            // The watcher ends with the bar, also where `f` panics.
            let _ends = Ends(&loading);
            f(&loading)
        })
    }

    /// Takes the bar off the screen.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}

/// Takes the bar off the screen when it is dropped.
struct Ends<'a>(&'a Loading);

impl Drop for Ends<'_> {
    fn drop(&mut self) {
        self.0.finish();
    }
}
