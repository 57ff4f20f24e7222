//! The memory and the page faults of a process.

use std::fs;

/// Returns the peak resident memory of this process, in bytes. `None` where the system does not report it; Linux does.
pub fn peak() -> Option<usize> {
    let status = fs::read_to_string("/proc/self/status").ok()?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:"))?;
    let kib: usize = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    Some(kib << 10)
}

/// Returns the memory that this machine has left for programs, in bytes. `None` where the system does not report it; Linux
/// does.
///
/// The limit of a container counts, if it has one.
pub fn available() -> Option<usize> {
    let info = fs::read_to_string("/proc/meminfo").ok()?;
    let line = info.lines().find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: usize = line.trim().trim_end_matches("kB").trim().parse().ok()?;
    let number = |name: &str| -> Option<usize> {
        fs::read_to_string(format!("/sys/fs/cgroup/memory.{name}")).ok()?.trim().parse().ok()
    };
    // Pages of files count as used, and the kernel takes them back when a program needs memory.
    let stat = fs::read_to_string("/sys/fs/cgroup/memory.stat").unwrap_or_default();
    let of_files = |name: &str| -> usize {
        let line = stat.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' '));
        line.and_then(|bytes| bytes.trim().parse().ok()).unwrap_or(0)
    };
    let files = of_files("inactive_file") + of_files("active_file");
    let limit =
        number("max").map(|most| most.saturating_sub(number("current").unwrap_or(0).saturating_sub(files)));
    Some((kib << 10).min(limit.unwrap_or(usize::MAX)))
}

/// Returns how often this process has touched a page that the kernel had to map, and mostly to clear, without reading a
/// file (`ru_minflt`). `None` where the system does not report it; Linux does.
pub fn page_faults() -> Option<u64> {
    let stat = fs::read_to_string("/proc/self/stat").ok()?;
    // The name, in parentheses, may contain spaces. The count is the eighth field after it.
    stat.rsplit_once(')')?.1.split_whitespace().nth(7)?.parse().ok()
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::page_faults;

    #[cfg(target_os = "linux")]
    #[test]
    fn touched_pages_are_counted() {
        let before = page_faults().unwrap();
        let size = 64 << 20;
        let bytes = vec![1u8; size];
        let faults = page_faults().unwrap() - before;
        // A page has at most 2 MiB.
        assert!(faults >= 32 && bytes.len() == size, "{faults} page faults for {size} bytes");
    }
}
