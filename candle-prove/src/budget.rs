//! The communication of a training step as a text that later versions are compared with.
use super::setup::Setup;
use super::trainer::{Subject, communication};
use candle_dist::comm::Event;
use candle_dist::{DeviceMesh, ProcessGroup};
use itertools::Itertools;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;
use std::path::Path;

/// The variable that has budgets written again.
const WRITE: &str = "CANDLE_PROVE_BUDGET";

const HEAD: &str = "\
# The communication of one training step, by source line: the calls of rank 0 and the bytes that it passes to them.
# CANDLE_PROVE_BUDGET=write writes this file again.
";

/// Calls of one op over the same axes: their number, and the bytes of this rank's inputs.
type CallTotal = (usize, usize);

/// The calls of set-ups: by set-up, file, line, and the op with its axes.
type CallTotals = BTreeMap<(String, String, u32, String), CallTotal>;

/// Compares the communication of these set-ups with the file, or writes it if there is none.
pub(super) fn check(subject: &Subject, setups: &[Setup], path: &Path) -> Result<(), String> {
    let mut now = CallTotals::new();
    for setup in setups {
        let name = setup.to_string().trim().to_string();
        for event in events(subject, setup)? {
            let key = (name.clone(), event.file, event.line, event.call);
            let sum = now.entry(key).or_default();
            (sum.0, sum.1) = (sum.0 + 1, sum.1 + event.bytes);
        }
    }
    let shown = path.display();
    let is_written = std::env::var_os(WRITE).is_some_and(|value| value == "write");
    let wrong = |error: std::io::Error| format!("{shown}: {error}");
    // A link without an end counts as something that is there, so nothing is created behind it.
    if std::fs::symlink_metadata(path).is_err() {
        let mut file = std::fs::File::create_new(path).map_err(wrong)?;
        return std::io::Write::write_all(&mut file, text(&now).as_bytes()).map_err(wrong);
    }
    let stored = std::fs::read_to_string(path).map_err(wrong)?;
    if is_written {
        return match stored.is_empty() || HEAD.lines().next() == stored.lines().next() {
            true => std::fs::write(path, text(&now)).map_err(wrong),
            false => Err(format!("{shown}: is no budget, so it is not written again; name another file")),
        };
    }
    let changes = changes(&read(&stored).map_err(|line| format!("{shown}: cannot read {line:?}"))?, &now);
    match changes.is_empty() {
        true => Ok(()),
        false => Err(format!(
            "{shown}: the communication of a step has changed; {WRITE}=write takes it is now\n{}",
            changes.join("\n")
        )),
    }
}

/// A call of rank 0.
struct SiteCall {
    file: String,
    line: u32,
    call: String,
    bytes: usize,
}

/// Returns the calls of a step of rank 0 in a world that need not exist.
fn events(subject: &Subject, setup: &Setup) -> Result<Vec<SiteCall>, String> {
    let wrong = |error: String| format!("{setup}: {error}");
    let group = ProcessGroup::simulated(0, setup.ranks()).map_err(|error| wrong(error.to_string()))?;
    let (mesh, events) = communication(subject, setup, &group).map_err(|error| wrong(error.to_string()))?;
    let made = |event: Event| SiteCall {
        file: event.site.file().to_string(),
        line: event.site.line(),
        call: format!("{} over {}", event.op, axes_of(&mesh, event.ranks.as_slice())),
        bytes: event.bytes,
    };
    Ok(events.into_iter().filter(|event| event.is_counted()).map(made).collect())
}

/// Returns the names of the axes whose group has these ranks.
fn axes_of(mesh: &DeviceMesh, ranks: &[usize]) -> String {
    let axes = (0..mesh.ndim()).filter(|&axis| mesh.shape()[axis] > 1).powerset();
    let found = axes.filter(|axes| !axes.is_empty()).find(|axes| {
        let names: Vec<&str> = axes.iter().map(|&axis| mesh.names()[axis].as_str()).collect();
        mesh.axes(&names).is_ok_and(|along| along.ranks() == ranks)
    });
    match found {
        Some(axes) => axes.into_iter().map(|axis| mesh.names()[axis].as_str()).join("+"),
        None => format!("{} ranks", ranks.len()),
    }
}

fn text(calls: &CallTotals) -> String {
    let mut text = HEAD.to_string();
    let mut last = "";
    for ((setup, file, line, call), (count, bytes)) in calls {
        if setup != last {
            let _ = write!(text, "\n[{setup}]\n");
            last = setup;
        }
        let _ = writeln!(text, "{file}:{line} {call}: {count} calls, {bytes} B");
    }
    text
}

fn read(text: &str) -> Result<CallTotals, String> {
    let (mut calls, mut setup) = (CallTotals::new(), String::new());
    for line in text.lines().filter(|line| !line.is_empty() && !line.starts_with('#')) {
        if let Some(name) = line.strip_prefix('[').and_then(|name| name.strip_suffix(']')) {
            setup = name.to_string();
            continue;
        }
        let parsed = || -> Option<_> {
            let (site, rest) = line.split_once(' ')?;
            let (file, number) = site.rsplit_once(':')?;
            let (call, sums) = rest.rsplit_once(": ")?;
            let (count, bytes) = sums.strip_suffix(" B")?.split_once(" calls, ")?;
            let key = (setup.clone(), file.to_string(), number.parse().ok()?, call.to_string());
            Some((key, (count.parse().ok()?, bytes.parse().ok()?)))
        };
        calls.extend([parsed().ok_or_else(|| line.to_string())?]);
    }
    Ok(calls)
}

/// Returns a line for each difference. Lines of a file may move without a difference.
fn changes(old: &CallTotals, new: &CallTotals) -> Vec<String> {
    let files = |calls: &CallTotals| {
        let mut sums: BTreeMap<(String, String, String), CallTotal> = BTreeMap::new();
        for ((setup, file, _, call), (count, bytes)) in calls {
            let sum = sums.entry((setup.clone(), file.clone(), call.clone())).or_default();
            (sum.0, sum.1) = (sum.0 + count, sum.1 + bytes);
        }
        sums
    };
    let (before, after) = (files(old), files(new));
    let keys: BTreeSet<_> =
        before.keys().chain(after.keys()).filter(|key| before.get(key) != after.get(key)).collect();
    let mut lines = Vec::new();
    for (setup, file, call) in keys {
        let of = |calls: &CallTotals| -> BTreeMap<u32, CallTotal> {
            let here = calls.iter().filter(|((s, f, _, c), _)| (s, f, c) == (setup, file, call));
            here.map(|((_, _, line, _), sum)| (*line, *sum)).collect()
        };
        let (before, after) = (of(old), of(new));
        for line in before.keys().chain(after.keys()).collect::<BTreeSet<_>>() {
            let [was, is] = [&before, &after].map(|sums| sums.get(line).copied().unwrap_or_default());
            if was != is {
                let ((calls, bytes), (now, size)) = (was, is);
                let bytes = format!("{} → {}", readable(bytes), readable(size));
                lines.push(format!("[{setup}] {file}:{line} {call}: {calls} → {now} calls, {bytes}"));
            }
        }
    }
    lines
}

fn readable(bytes: usize) -> String {
    match bytes {
        0..1_000 => format!("{bytes} B"),
        1_000..1_000_000 => format!("{:.1} kB", bytes as f64 / 1e3),
        1_000_000..1_000_000_000 => format!("{:.1} MB", bytes as f64 / 1e6),
        _ => format!("{:.1} GB", bytes as f64 / 1e9),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn calls(rows: &[(&str, u32, &str, CallTotal)]) -> CallTotals {
        let row = |&(file, line, call, sum): &(&str, u32, &str, CallTotal)| {
            (("tp=2".to_string(), file.to_string(), line, call.to_string()), sum)
        };
        rows.iter().map(row).collect()
    }

    #[test]
    fn a_budget_reads_what_it_writes_and_names_what_changed() {
        let old = calls(&[
            ("a.rs", 3, "all_reduce over tp", (2, 64)),
            ("b.rs", 88, "all_reduce over dp+tp", (1, 8)),
        ]);
        assert_eq!(read(&text(&old)), Ok(old.clone()));
        let moved = calls(&[
            ("a.rs", 7, "all_reduce over tp", (2, 64)),
            ("b.rs", 88, "all_reduce over dp+tp", (1, 8)),
        ]);
        assert!(changes(&old, &moved).is_empty());
        let more = calls(&[
            ("a.rs", 3, "all_reduce over tp", (2, 64)),
            ("b.rs", 88, "all_gather over tp", (1, 1_200_000_000)),
            ("b.rs", 88, "all_reduce over dp+tp", (1, 8)),
        ]);
        assert_eq!(changes(&old, &more), ["[tp=2] b.rs:88 all_gather over tp: 0 → 1 calls, 0 B → 1.2 GB"]);
        assert_eq!(read("a.rs: nonsense"), Err("a.rs: nonsense".to_string()));
    }
}
