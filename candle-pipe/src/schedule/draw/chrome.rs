//! Export of timelines for a trace viewer, such as `ui.perfetto.dev` or `chrome://tracing`.
use crate::schedule::{Span, Timeline};
use candle_dist::comm::trace;
use serde_json::{Value, json};
use std::fs::File;
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Writes timelines, with times in seconds, in Chrome's Trace Event Format.
///
/// A timeline is a process, and each of its ranks is two threads, one for computations and one for sends; each timeline
/// begins at 0.
///
/// ```
/// use candle_pipe::schedule::{Costs, Edges, ScheduleKind, draw};
///
/// let schedule = ScheduleKind::Zbv.schedule(2, 4, 2)?;
/// let costs = Costs::per_rank(schedule.stage_ranks(), 1e-3, 1e-3, 1e-3);
/// let timeline = schedule.simulate(&Edges::chain(4), &costs)?;
/// let mut json = Vec::new();
/// draw::write_chrome(&mut json, &[("predicted", &timeline)])?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// If `out` cannot be written to.
pub fn write_chrome(out: impl Write, timelines: &[(&str, &Timeline)]) -> io::Result<()> {
    let rows =
        timelines.iter().enumerate().flat_map(|(process, &(name, timeline))| rows(process, name, timeline));
    trace::write_rows(out, rows)
}

/// Like [`write_chrome`], to a new file.
///
/// # Errors
/// If the file cannot be created or written.
pub fn save_chrome(path: impl AsRef<Path>, timelines: &[(&str, &Timeline)]) -> io::Result<()> {
    write_chrome(BufWriter::new(File::create(path)?), timelines)
}

fn rows(process: usize, name: &str, timeline: &Timeline) -> Vec<Value> {
    let origin = timeline.ranks.iter().flatten().map(|span| span.start).fold(f64::INFINITY, f64::min);
    let mut rows = vec![json!({"name": "process_name", "ph": "M", "pid": process, "args": {"name": name}})];
    let computed =
        timeline.ranks.iter().enumerate().map(|(rank, spans)| (2 * rank, format!("rank {rank}"), spans));
    let sent = timeline.transfers.iter().enumerate();
    let sent = sent.map(|(rank, spans)| (2 * rank + 1, format!("rank {rank} sends"), spans));
    for (thread, name, spans) in computed.chain(sent).filter(|(.., spans)| !spans.is_empty()) {
        let args = json!({"name": name});
        rows.push(json!({"name": "thread_name", "ph": "M", "pid": process, "tid": thread, "args": args}));
        let args = json!({"sort_index": thread});
        rows.push(
            json!({"name": "thread_sort_index", "ph": "M", "pid": process, "tid": thread, "args": args}),
        );
        rows.extend(spans.iter().map(|span| event(process, thread, span, origin)));
    }
    rows
}

fn event(process: usize, thread: usize, span: &Span, origin: f64) -> Value {
    json!({
        "name": span.action.to_string(),
        "cat": if span.action.computes().is_empty() { "communication" } else { "computation" },
        "ph": "X",
        "pid": process,
        "tid": thread,
        "ts": (span.start - origin) * 1e6,
        "dur": (span.end - span.start) * 1e6,
    })
}
