//! The memory of a process.

use std::fs;

/// Returns the peak resident memory of this process, in bytes. `None` where the system does not report it; Linux does.
pub fn peak() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib << 10)
}
