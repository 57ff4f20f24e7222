//! Faults of the program under test, with the calls that caused them.
use parking_lot::Mutex;
use std::backtrace::Backtrace;
use std::collections::HashSet;
use std::fmt;
use std::io::Write;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A call of the program: what, by which thread, and where.
pub(crate) struct Site {
    call: String,
    thread: String,
    number: u64,
    trace: Option<Backtrace>,
}

static CALLS: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The name of this thread. The library has a standard library of its own, which does not know it.
    static THREAD: String = {
        let name = std::fs::read_to_string("/proc/thread-self/comm").unwrap_or_default();
        name.trim_end().to_string()
    };
}

impl Site {
    /// Records the call that the current thread makes.
    pub(crate) fn here(call: impl Into<String>) -> Arc<Self> {
        let thread = THREAD.try_with(String::clone).unwrap_or_else(|_| "a thread that ends".to_string());
        let number = CALLS.fetch_add(1, Ordering::Relaxed);
        let trace = crate::settings::get().backtraces.then(Backtrace::force_capture);
        Arc::new(Self { call: call.into(), thread, number, trace })
    }

    pub(crate) fn call(&self) -> &str {
        &self.call
    }

    /// Returns the functions of the workspace that led to the call, innermost first.
    fn path(&self) -> String {
        let Some(trace) = &self.trace else { return String::new() };
        let text = trace.to_string();
        let ours =
            |line: &&str| line.contains("candle") && !line.contains("nccl_sim") && !line.contains(" at ");
        let names =
            text.lines().map(str::trim).filter(ours).map(|line| line.split(": ").last().unwrap_or(line));
        let names: Vec<_> = names.take(8).collect();
        if names.is_empty() { String::new() } else { format!(" via {}", names.join(" < ")) }
    }
}

impl fmt::Display for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} (thread {:?}, call {}){}", self.call, self.thread, self.number, self.path())
    }
}

impl fmt::Debug for Site {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The kinds of faults.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Kind {
    /// Two accesses, at least one of which writes, that nothing orders.
    Race,
    /// Memory is used before its allocation or after its free, or outside of all allocations.
    Memory,
    /// Memory is read that nothing has written.
    Unwritten,
    /// The members of a communicator make different calls.
    Mismatch,
    /// A call that the documents forbid.
    Misuse,
    /// Nothing can run, and a thread waits.
    Deadlock,
}

#[derive(Default)]
struct Reports {
    seen: HashSet<(Kind, String)>,
    all: Vec<(Kind, String)>,
}

static REPORTS: Mutex<Option<Reports>> = Mutex::new(None);

/// Reports a fault once per `key`: to the standard error, and to the file `SIM_REPORT`.
pub(crate) fn fault(kind: Kind, key: impl Into<String>, text: impl fmt::Display) {
    let mut reports = REPORTS.lock();
    let reports = reports.get_or_insert_default();
    let text = format!("nccl-sim: {kind:?}: {text}");
    if !reports.seen.insert((kind, key.into())) {
        return;
    }
    reports.all.push((kind, text.clone()));
    let seed = crate::settings::seed();
    let line = format!("{text} [seed {seed}]\n");
    // The simulator's own tests look at the list.
    if cfg!(not(test)) {
        let _ = std::io::stderr().write_all(line.as_bytes());
    }
    if let Some(path) = &crate::settings::get().report {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        let _ = file.and_then(|mut file| file.write_all(line.as_bytes()));
    }
}

/// Returns and forgets all faults so far.
#[cfg(test)]
pub(crate) fn take() -> Vec<(Kind, String)> {
    REPORTS.lock().take().map(|reports| reports.all).unwrap_or_default()
}

/// Ends the process because the program called a function that is not modeled.
#[allow(dead_code, reason = "called by the functions that build.rs writes")]
pub(crate) fn unmodeled(name: &str) -> ! {
    die(&format!("{name} is not modeled"))
}

/// Ends the process.
pub(crate) fn die(message: &str) -> ! {
    let _ = writeln!(std::io::stderr(), "nccl-sim: {message}");
    std::process::abort()
}
