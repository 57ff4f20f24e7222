//! What a process takes.

use std::fs;

/// The most memory that this process had in RAM so far, in bytes; `None` where the system does not tell, as Linux does.
pub fn peak() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib << 10)
}
