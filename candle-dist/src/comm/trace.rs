//! Writes the events of all ranks as a file for a trace viewer, such as `ui.perfetto.dev` or `chrome://tracing`.
//!
//! The format is Chrome's Trace Event Format, JSON object form. Each call is one complete event (`"ph": "X"`), and each
//! rank is one row (process). Times are in microseconds since the first call of any rank.
use super::event::Event;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Writes the events of some ranks of one process to `out`, one row per rank.
///
/// ```
/// use candle_dist::{World, comm::{Log, trace}};
///
/// let events = World::threads(2).run(|ctx| -> candle_dist::Result<_> {
///     let (met, events) = Log::of(|| ctx.group().barrier());
///     met.map(|()| (ctx.rank(), events))
/// }).unwrap();
/// let mut json = Vec::new();
/// trace::write_chrome(&mut json, &events)?;
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// # Errors
/// If writing to `out` fails.
pub fn write_chrome(out: impl Write, ranks: &[(usize, Vec<Event>)]) -> io::Result<()> {
    let origin = ranks.iter().flat_map(|(_, events)| events).map(|event| event.start).min();
    let rows = ranks.iter().flat_map(|(rank, events)| {
        let title =
            json!({"name": "process_name", "ph": "M", "pid": rank, "args": {"name": format!("rank {rank}")}});
        let place =
            json!({"name": "process_sort_index", "ph": "M", "pid": rank, "args": {"sort_index": rank}});
        let calls = events.iter().map(|event| {
            let since = origin.map(|origin| event.start - origin).unwrap_or_default();
            call(*rank, event, since.as_secs_f64() * 1e6)
        });
        [title, place].into_iter().chain(calls)
    });
    write_rows(out, rows)
}

/// Writes arbitrary rows to `out` in the format's JSON object form.
///
/// # Errors
/// If writing to `out` fails.
pub fn write_rows(mut out: impl Write, rows: impl IntoIterator<Item = Value>) -> io::Result<()> {
    out.write_all(b"{\"displayTimeUnit\": \"ms\", \"traceEvents\": [")?;
    for (i, row) in rows.into_iter().enumerate() {
        out.write_all(if i == 0 { b"\n" } else { b",\n" })?;
        serde_json::to_writer(&mut out, &row)?;
    }
    out.write_all(b"\n]}\n")?;
    out.flush()
}

/// Like [`write_chrome`], to a new file.
///
/// # Errors
/// If the file cannot be created or written.
pub fn save_chrome(path: impl AsRef<Path>, ranks: &[(usize, Vec<Event>)]) -> io::Result<()> {
    write_chrome(BufWriter::new(File::create(path)?), ranks)
}

fn call(rank: usize, event: &Event, since_us: f64) -> Value {
    let mut args = json!({
        "bytes": event.bytes,
        "group": event.ranks.as_slice(),
        "site": format!("{}:{}", event.site.file(), event.site.line()),
    });
    if let Some(peer) = event.peer {
        args["peer"] = json!(peer);
    }
    json!({
        "name": event.name(),
        "cat": "communication",
        "ph": "X",
        "pid": rank,
        "tid": 0,
        "ts": since_us,
        "dur": event.duration.as_secs_f64() * 1e6,
        "args": args,
    })
}
