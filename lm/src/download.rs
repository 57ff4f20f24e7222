//! What is told of downloads.

use std::cell::RefCell;

use candle_dist::printable;
use candle_lm::hub::Download;
use examples::cli;
use indicatif::{ProgressBar, ProgressStyle};

/// The bytes of one file on stderr, if that is a terminal, and a note if another program downloads it.
#[derive(Default)]
pub(crate) struct Progress(RefCell<Option<ProgressBar>>);

impl Progress {
    /// Shows what happens.
    pub(crate) fn show(&self, event: Download<'_>) {
        match event {
            Download::Wait { file } => {
                cli::tell("note", format_args!("another program downloads {file}: waiting for it."));
            }
            Download::Bytes { file, bytes, size } => {
                let mut shown = self.0.borrow_mut();
                let bar = shown.get_or_insert_with(|| bar(file));
                bar.set_length(size.unwrap_or(bytes));
                bar.set_position(bytes);
            }
            Download::End { .. } => {
                if let Some(bar) = self.0.take() {
                    bar.finish_and_clear();
                }
            }
        }
    }
}

fn bar(file: &str) -> ProgressBar {
    let style =
        ProgressStyle::with_template("{msg} {bar:32} {bytes} of {total_bytes} [{elapsed}, {eta} left]");
    let style = style.unwrap_or_else(|_| ProgressStyle::default_bar());
    ProgressBar::new(0).with_style(style).with_message(printable(file).into_owned())
}
