//! Warnings that matter to a program without a logger too.
use log::LevelFilter;
use parking_lot::Mutex;
use std::collections::BTreeSet;
use std::fmt::Arguments;
use std::io::Write;

/// The most texts that go to stderr.
const MOST: usize = 100;

/// Logs a warning. In a program without a logger each text goes to stderr once, and 100 texts at most.
///
/// ```
/// candle_dist::warn(format_args!("{} of {} layers match the plan", 0, 4)); // prints `warning: 0 of 4 layers match the plan`
/// ```
pub fn warn(text: Arguments<'_>) {
    static TOLD: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    // A logger raises the level when it is installed.
    if log::max_level() != LevelFilter::Off {
        return log::warn!("{text}");
    }
    let mut told = TOLD.lock();
    if told.len() < MOST && told.insert(text.to_string()) {
        print(format_args!("warning: {text}"));
        if told.len() == MOST {
            print(format_args!("warning: these were {MOST} warnings; install a logger to see more"));
        }
    }
}

/// Writes a line to stderr at once, so that those of several ranks do not mix.
pub(crate) fn print(line: Arguments<'_>) {
    let line = format!("{line}\n");
    // There is nobody to tell that it failed.
    std::io::stderr().write_all(line.as_bytes()).ok();
}
