//! Detects memory leaks of a process.

/// The limit of growth in a measured part, in KiB: three bytes per call for 100 000 calls.
const BOUND: usize = 256;

/// Returns the resident memory of this process in KiB, as reported by Linux.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches("kB").trim().parse().ok()
}

/// Runs `work` several times to warm up, and then `times` times, during which the process must not grow.
///
/// The system's allocator may grow once, but a leak grows every time. The measured memory is that of the whole process,
/// so a program with such a test must have no other tests.
///
/// # Errors
/// The errors of `work`.
///
/// # Panics
/// If the process grows, or the system does not report its memory.
pub fn stays_flat<E>(what: &str, times: usize, mut work: impl FnMut() -> Result<(), E>) -> Result<(), E> {
    (0..times / 5).try_for_each(|_| work())?;
    let mut grown = Vec::new();
    // A fixed number of times, because all ranks must do the same work.
    for _ in 0..3 {
        let before = resident();
        (0..times).try_for_each(|_| work())?;
        grown.push(resident().zip(before).map(|(after, before)| after.saturating_sub(before)));
    }
    assert!(grown.iter().flatten().any(|&kib| kib < BOUND), "{times} {what} left {grown:?} KiB");
    Ok(())
}
