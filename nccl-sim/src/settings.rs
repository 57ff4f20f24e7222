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
    /// `SIM_QUEUES`: the hardware queues of a device for each priority, instead of `CUDA_DEVICE_MAX_CONNECTIONS`.
    queues: Option<usize>,
    /// `SIM_CTAS`: how many CTAs a device runs at once; the multiprocessors of an H100 by default.
    ctas: usize,
    /// `SIM_WAITS=0`: destroyed communicators, freed host memory, loaded kernels and large copies from pageable memory
    /// do not wait for the device.
    waits: bool,
    /// `SIM_LOADS`: when loaded code waits for the device: with its `module`, at the first run of a `kernel`, or `never`; by default
    /// `module`.
    loads: Loads,
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

/// When code that is loaded waits for the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Loads {
    /// When its module is loaded (`CUDA_MODULE_LOADING=EAGER`).
    Module,
    /// When a kernel is launched for the first time ("Lazy Loading", "Concurrent Execution").
    Kernel,
    Never,
}

fn loads() -> Loads {
    match std::env::var("SIM_LOADS").as_deref() {
        Err(_) | Ok("module") => Loads::Module,
        Ok("kernel") => Loads::Kernel,
        Ok("never") => Loads::Never,
        Ok(other) => crate::report::die(&format!("SIM_LOADS={other} is not module, kernel or never")),
    }
}

/// What the cards and NCCL are like. The simulator's own tests change it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Rules {
    /// The hardware queues of a device for each priority.
    pub(crate) queues: usize,
    /// How many CTAs a device runs at once.
    pub(crate) ctas: usize,
    /// Whether calls that may wait for the device do.
    pub(crate) waits: bool,
    pub(crate) loads: Loads,
    /// The variables of NCCL; those of the process if there are none.
    pub(crate) nccl: Option<NcclVariables>,
}

impl Rules {
    /// Returns those that the variables of this process say.
    pub(crate) fn of_process() -> Self {
        let Settings { ctas, waits, loads, .. } = *get();
        Self { queues: connections(), ctas, waits, loads, nccl: None }
    }
}

/// Returns how many hardware queues a device has, as `cuInit` finds it in the environment.
pub(crate) fn connections() -> usize {
    static CONNECTIONS: OnceLock<usize> = OnceLock::new();
    *CONNECTIONS.get_or_init(|| {
        let asked = std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok().and_then(|text| text.parse().ok());
        get().queues.unwrap_or(asked.filter(|count| (1..=32).contains(count)).unwrap_or(8))
    })
}

/// The variables of NCCL that the simulator knows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NcclVariables {
    /// `NCCL_RUNTIME_CONNECT`: whether communicators connect at the first call that needs it.
    pub(crate) runtime_connect: bool,
    /// `NCCL_MAX_CTAS`, which overrides the configuration of communicators.
    pub(crate) max_ctas: Option<usize>,
    /// `NCCL_MULTI_RANK_GPU_ENABLE`: whether members may share a GPU.
    pub(crate) multi_rank: bool,
}

/// Returns the variables of NCCL, which reads them once, when it makes the first communicator (`param.cc`).
pub(crate) fn nccl_variables() -> NcclVariables {
    static VARIABLES: OnceLock<NcclVariables> = OnceLock::new();
    *VARIABLES.get_or_init(|| {
        let number = |name| std::env::var(name).ok().and_then(|text| text.trim().parse::<i64>().ok());
        NcclVariables {
            runtime_connect: number("NCCL_RUNTIME_CONNECT") != Some(0),
            max_ctas: number("NCCL_MAX_CTAS").filter(|&most| most > 0).map(|most| most as usize),
            multi_rank: number("NCCL_MULTI_RANK_GPU_ENABLE").is_some_and(|value| value != 0),
        }
    })
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
        queues: std::env::var_os("SIM_QUEUES").map(|_| number("SIM_QUEUES", 8).max(1) as usize),
        ctas: number("SIM_CTAS", 132) as usize,
        waits: number("SIM_WAITS", 1) == 1,
        loads: loads(),
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
