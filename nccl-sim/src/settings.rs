//! Settings from the environment.
use std::io::Write;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The settings of this process.
#[derive(Debug)]
pub(crate) struct Settings {
    /// `SIM_SEED`: the first seed. A seed decides what CUDA leaves open.
    first_seed: u64,
    /// `SIM_SEEDS`: how many seeds the worlds of this process take in turn.
    seeds: u64,
    /// `SIM_USED`: a file to which each seed is appended when a world takes it.
    used: Option<PathBuf>,
    /// `SIM_CALLS`: a file for the number of calls of each function, written when a communicator ends.
    pub(crate) calls: Option<PathBuf>,
    /// `SIM_TIMELINE`: a file for how long each GPU computed and communicated, written when a communicator ends.
    pub(crate) timeline: Option<PathBuf>,
    /// `SIM_SCALE`: how many times as long each dim is on the timeline.
    pub(crate) scale: f64,
    /// `SIM_FAULT`: what NCCL does wrong, and at which of the process's calls, as in `stall:7`.
    pub(crate) fault: Option<(Wrong, u64)>,
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

/// What NCCL does wrong.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Wrong {
    /// `refuse`: the call returns an error.
    Refuses,
    /// `lose`: the network is lost. The call never ends, and the communicator reports an error.
    Loses,
    /// `stall`: the call never ends, and nothing is reported.
    Stalls,
}

fn wrong(text: &str) -> Option<(Wrong, u64)> {
    let (what, at) = text.split_once(':')?;
    let wrong = match what {
        "refuse" => Wrong::Refuses,
        "lose" => Wrong::Loses,
        "stall" => Wrong::Stalls,
        _ => return None,
    };
    Some((wrong, at.parse().ok()?))
}

fn number(name: &str, default: u64) -> u64 {
    let Ok(text) = std::env::var(name) else { return default };
    text.parse().unwrap_or_else(|_| crate::report::die(&format!("{name}={text} is not a number")))
}

/// Returns the settings.
pub(crate) fn get() -> &'static Settings {
    static SETTINGS: OnceLock<Settings> = OnceLock::new();
    SETTINGS.get_or_init(|| Settings {
        first_seed: number("SIM_SEED", 0),
        // Processes do not see each other's worlds, and must agree on the seed.
        seeds: if std::env::var_os("SIM_DIR").is_some() { 1 } else { number("SIM_SEEDS", 1).max(1) },
        used: std::env::var_os("SIM_USED").map(PathBuf::from),
        calls: std::env::var_os("SIM_CALLS").map(PathBuf::from),
        timeline: std::env::var_os("SIM_TIMELINE").map(PathBuf::from),
        scale: number("SIM_SCALE", 1) as f64,
        fault: std::env::var("SIM_FAULT").ok().map(|text| {
            wrong(&text)
                .unwrap_or_else(|| crate::report::die(&format!("SIM_FAULT={text} is no fault with a number")))
        }),
        gpus: number("SIM_GPUS", 8) as usize,
        report: std::env::var_os("SIM_REPORT").map(PathBuf::from),
        backtraces: number("SIM_BACKTRACE", 0) == 1,
        folder: std::env::var_os("SIM_DIR").map(PathBuf::from),
        capacity: number("SIM_CAPACITY", 1 << 20) as usize,
        hang: Duration::from_secs(number("SIM_HANG_SECONDS", 60)),
    })
}

/// How many worlds have begun.
static WORLDS: AtomicU64 = AtomicU64::new(0);

/// Returns the seed of the present world.
pub(crate) fn seed() -> u64 {
    let Settings { first_seed, seeds, .. } = get();
    first_seed + WORLDS.load(Ordering::Relaxed).saturating_sub(1) % seeds
}

/// A world begins. Returns its seed if there are several.
pub(crate) fn next_seed() -> Option<u64> {
    let nth = WORLDS.fetch_add(1, Ordering::Relaxed);
    let (settings, seed) = (get(), seed());
    if let Some(path) = settings.used.as_ref().filter(|_| nth < settings.seeds) {
        let file = std::fs::OpenOptions::new().create(true).append(true).open(path);
        let _ = file.and_then(|mut file| writeln!(file, "{seed}"));
    }
    (settings.seeds > 1).then_some(seed)
}
