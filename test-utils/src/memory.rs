//! Telling whether a process leaks.

/// How much the process may grow in a measured part, in KiB: three bytes for each of 100 000 calls.
const BOUND: usize = 256;

/// The memory of this process that is in RAM, in KiB, as Linux tells it.
fn resident() -> Option<usize> {
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
    line.trim().trim_end_matches("kB").trim().parse().ok()
}

/// Does `work` some times to warm up, then `times` times, in which the process must not grow.
///
/// What the system's allocator keeps may grow once; a leak grows every time. Memory is the process's: a program with such
/// a test has no other tests.
///
/// # Errors
/// Those of `work`.
///
/// # Panics
/// If the process grows, or the system does not tell.
pub fn stays_flat<E>(what: &str, times: usize, mut work: impl FnMut() -> Result<(), E>) -> Result<(), E> {
    (0..times / 5).try_for_each(|_| work())?;
    let mut grown = Vec::new();
    // Always as often: ranks must do the same work.
    for _ in 0..3 {
        let before = resident();
        (0..times).try_for_each(|_| work())?;
        grown.push(resident().zip(before).map(|(after, before)| after.saturating_sub(before)));
    }
    assert!(grown.iter().flatten().any(|&kib| kib < BOUND), "{times} {what} left {grown:?} KiB");
    Ok(())
}
