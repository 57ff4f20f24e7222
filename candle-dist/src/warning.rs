//! Warnings that matter to a program without a logger too.
use log::LevelFilter;
use std::fmt::Arguments;

/// Logs a warning. In a program without a logger it goes to stderr.
///
/// ```
/// candle_dist::warn(format_args!("{} of {} layers match the plan", 0, 4)); // prints `warning: 0 of 4 layers match the plan`
/// ```
pub fn warn(text: Arguments<'_>) {
    // A logger raises the level when it is installed.
    match log::max_level() {
        LevelFilter::Off => eprintln!("warning: {text}"),
        _ => log::warn!("{text}"),
    }
}
