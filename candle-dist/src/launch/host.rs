//! The name of the host of this process.

/// Returns the name of this host, as the system tells it; empty if it does not.
#[cfg(unix)]
pub fn host_name() -> String {
    rustix::system::uname().nodename().to_string_lossy().into_owned()
}

/// Returns the name of this host, as the system tells it; empty if it does not.
#[cfg(not(unix))]
pub fn host_name() -> String {
    std::env::var("COMPUTERNAME").unwrap_or_default()
}
