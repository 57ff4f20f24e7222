//! A progress bar on stderr.

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

    /// Takes the bar off the screen; the report says all it had to say.
    pub fn finish(&self) {
        self.0.finish_and_clear();
    }
}
