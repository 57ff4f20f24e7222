//! Settings from the environment.
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

/// The settings of this process.
#[derive(Debug)]
pub(crate) struct Settings {
    /// `SIM_SEED`: decides what CUDA leaves open.
    pub(crate) seed: u64,
    /// `SIM_GPUS`: the number of devices.
    pub(crate) gpus: usize,
    /// `SIM_REPORT`: a file to which faults are appended.
    pub(crate) report: Option<PathBuf>,
    /// `SIM_BACKTRACE=1`: faults name the callers.
    pub(crate) backtraces: bool,
    /// `SIM_DIR`: a folder through which processes exchange data.
    pub(crate) folder: Option<PathBuf>,
    /// `SIM_CAPACITY`: how many communicators' kernels run at once on a device.
    pub(crate) capacity: usize,
    /// `SIM_HANG_SECONDS`: how long nothing may happen while a thread waits in CUDA.
    pub(crate) hang: Duration,
}

fn number(name: &str, default: u64) -> u64 {
    let Ok(text) = std::env::var(name) else { return default };
    text.parse().unwrap_or_else(|_| crate::report::die(&format!("{name}={text} is not a number")))
}

/// Returns the settings.
pub(crate) fn get() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| Settings {
        seed: number("SIM_SEED", 0),
        gpus: number("SIM_GPUS", 8) as usize,
        report: std::env::var_os("SIM_REPORT").map(PathBuf::from),
        backtraces: number("SIM_BACKTRACE", 0) == 1,
        folder: std::env::var_os("SIM_DIR").map(PathBuf::from),
        capacity: number("SIM_CAPACITY", 1 << 20) as usize,
        hang: Duration::from_secs(number("SIM_HANG_SECONDS", 60)),
    })
}
