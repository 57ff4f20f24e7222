//! What the log says of batches that are cut otherwise than asked.
use crate::microbatches::of;
use candle_pipe::microbatch::split_args_kwargs_into_chunks;
use candle_pipe::{Kwargs, Result};
use log::{Level, LevelFilter, Log, Metadata, Record};
use std::sync::Mutex;
use std::thread::{self, ThreadId};

/// Warnings, with the threads that gave them.
struct Lines(Mutex<Vec<(ThreadId, String)>>);

static LINES: Lines = Lines(Mutex::new(Vec::new()));

impl Log for Lines {
    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        metadata.level() <= Level::Warn
    }

    fn log(&self, record: &Record<'_>) {
        self.0.lock().unwrap().push((thread::current().id(), record.args().to_string()));
    }

    fn flush(&self) {}
}

#[test]
fn fewer_chunks_than_asked_are_told_of() -> Result<()> {
    log::set_logger(&LINES).unwrap();
    log::set_max_level(LevelFilter::Warn);
    for (rows, chunks, want) in [
        (3, 8, vec!["a batch of 3 rows is cut into 3 microbatches, not into the 8 that were asked for"]),
        (8, 8, vec![]),
        (9, 2, vec![]),
    ] {
        LINES.0.lock().unwrap().clear();
        split_args_kwargs_into_chunks(&[of(&[rows, 2])], &Kwargs::new(), chunks, None, None)?;
        let told = LINES.0.lock().unwrap().clone();
        let mine: Vec<&str> = told
            .iter()
            .filter(|(thread, _)| *thread == thread::current().id())
            .map(|(_, text)| text.as_str())
            .collect();
        assert_eq!(mine, want, "{rows} rows in {chunks} chunks");
    }
    log::set_max_level(LevelFilter::Off);
    Ok(())
}
