//! How often the program calls the functions that cost most: NCCL's, those with which it waits, and those that launch and copy.
use crate::settings;
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;

static CALLS: Mutex<BTreeMap<String, u64>> = Mutex::new(BTreeMap::new());

unsafe extern "C" {
    fn atexit(run: extern "C" fn()) -> std::ffi::c_int;
}

/// Counts a call, if that is asked for.
pub(crate) fn count(function: &str) {
    if settings::get().calls.is_some() {
        // A program may have no communicator whose end writes the counts.
        static AT_END: std::sync::Once = std::sync::Once::new();
        extern "C" fn write_at_end() {
            write();
        }
        // SAFETY: the function is one of this library, which stays loaded.
        AT_END.call_once(|| _ = unsafe { atexit(write_at_end) });
        *CALLS.lock().entry(function.to_string()).or_default() += 1;
    }
}

/// Counts a launch of a kernel: in all, and by its name.
pub(crate) fn count_launch(kernel: &str) {
    if settings::get().calls.is_some() {
        count("cuLaunchKernel");
        count(&format!("kernel {kernel}"));
    }
}

/// Writes the counts, if that is asked for.
pub(crate) fn write() {
    let Some(path) = &settings::get().calls else { return };
    let calls = CALLS.lock(); // until it is written: a thread that comes later has counted more
    let mut text = String::new();
    for (function, calls) in &*calls {
        let _ = writeln!(text, "{function} {calls}");
    }
    replace(path, &text);
}

/// Replaces a file, so that a process that ends leaves the old one or the new one.
///
/// Threads that end at the same time take turns: otherwise one would rename the other's part.
pub(crate) fn replace(path: &Path, text: &str) {
    static TURN: Mutex<()> = Mutex::new(());
    let _turn = TURN.lock();
    let part = path.with_extension(format!("part-{}", std::process::id()));
    if let Err(error) = std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, path)) {
        crate::report::die(&format!("{}: {error}", path.display()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without turns, one thread renames what another writes, and the process dies.
    #[test]
    fn threads_replace_a_file_at_the_same_time() {
        let path = std::env::temp_dir().join(format!("nccl-sim-replace-{}", std::process::id()));
        std::thread::scope(|scope| {
            (0..4).for_each(|at| {
                let path = &path;
                scope.spawn(move || (0..500).for_each(|_| replace(path, &format!("written by {at}\n"))));
            });
        });
        let text = std::fs::read_to_string(&path).unwrap();
        std::fs::remove_file(&path).unwrap();
        assert!(text.starts_with("written by ") && text.lines().count() == 1, "{text}");
    }
}
