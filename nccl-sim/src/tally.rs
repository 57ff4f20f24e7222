//! How often the program calls the functions that cost most: NCCL's, and those with which it waits.
use crate::settings;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

static CALLS: Mutex<BTreeMap<&str, u64>> = Mutex::new(BTreeMap::new());

/// Counts a call, if that is asked for.
pub(crate) fn count(function: &'static str) {
    if settings::get().calls.is_some() {
        *CALLS.lock().entry(function).or_default() += 1;
    }
}

/// Writes the counts, if that is asked for.
pub(crate) fn write() {
    let Some(path) = &settings::get().calls else { return };
    let mut text = String::new();
    for (function, calls) in &*CALLS.lock() {
        let _ = writeln!(text, "{function} {calls}");
    }
    replace(path, &text);
}

/// Replaces a file, so that a process that ends leaves the old one or the new one.
pub(crate) fn replace(path: &Path, text: &str) {
    let part = path.with_extension("part");
    if let Err(error) = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, path)) {
        crate::report::die(&format!("{}: {error}", path.display()));
    }
}
