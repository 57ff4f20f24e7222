//! Sets the number of candle's compute threads, before the first tensor op.
//!
//! candle's CPU thread pools belong to the process, and a whole elementwise op holds one of them locked. Ranks that are
//! threads thus wait for each other unless each rank computes on its own thread. Both pools read their environment
//! variable (`CANDLE_NUM_THREADS`, `RAYON_NUM_THREADS`) once and have no other setting. Each matrix product asks for the number
//! again, and where `RAYON_NUM_THREADS` is not set, candle counts the cores each time: on Linux it parses `/proc/cpuinfo`,
//! which takes longer than a small product. The first local world therefore sets the variables, once per process.
//!
//! After an elementwise op, candle's threads look for the next one for a third of a millisecond, and take cores from the other pool.
//! `CANDLE_BARRIER_POOL_SPIN_LIMIT` ends that earlier, and is set with the other two.
//!
//! In builds for GPUs it also sets two variables that CUDA and NCCL read at their start (`CUDA_DEVICE_MAX_CONNECTIONS`, `NCCL_RUNTIME_CONNECT`).
//!
//! The environment may change only while no other thread can read it: [`settle`] changes it only if the process has a single
//! thread, and the caller of [`settle_among_threads`] guarantees it.
mod cores;

use std::sync::OnceLock;

static SETTLED: OnceLock<usize> = OnceLock::new();

const VARIABLES: [&str; 2] = ["CANDLE_NUM_THREADS", "RAYON_NUM_THREADS"];

/// How many times a thread of candle's elementwise ops looks for work before it sleeps: some 10 µs.
const SPIN: (&str, &str) = ("CANDLE_BARRIER_POOL_SPIN_LIMIT", "1000");

/// What CUDA and NCCL shall find in the environment, unless the user has set it.
///
/// - A GPU has 8 queues for all streams of a process, and a stream that waits at the head of one holds up the others in it. There can be 32.
/// - NCCL connects ranks inside of the first call of each algorithm, which then waits for the other ranks, even if it was only started.
///   It can connect them when a communicator is made, in which all of them take part.
pub(crate) const GPU: &[(&str, &str)] =
    if cfg!(feature = "nccl") { &[(CONNECTIONS, QUEUES), ("NCCL_RUNTIME_CONNECT", "0")] } else { &[] };

/// How many queues CUDA has for the streams of a GPU, and how many we ask for: the most that there are.
const CONNECTIONS: &str = "CUDA_DEVICE_MAX_CONNECTIONS";
const QUEUES: &str = "32";

/// The most compute threads of a rank. Pools reserve memory for each.
const MOST: usize = 1 << 12;

/// Refuses numbers of compute threads with which candle's pools cannot start.
pub(crate) fn check(per_rank: Option<usize>) -> Result<(), String> {
    let given = VARIABLES
        .map(|name| (name, std::env::var(name).ok().and_then(|text| text.trim().parse::<u128>().ok())));
    let wanted = ("threads_per_rank", per_rank.map(|threads| threads as u128));
    match given
        .into_iter()
        .chain([wanted])
        .find(|(_, number)| number.is_some_and(|number| number > MOST as u128))
    {
        Some((name, Some(number))) => Err(format!(
            "{name} is {number}; a rank computes with at most {MOST} threads, so set less or unset it"
        )),
        _ => Ok(()),
    }
}

/// Returns the default number of compute threads of a process that is one of `ranks` on its host, at least one: the cores divided by the
/// ranks.
///
/// Where a launcher has bound the process to some of the cores, it has divided them already, and the process has as many threads as cores.
/// Several processes that are bound to the same ones, such as those of a socket, have no more threads together than the host has cores.
pub fn default_of_process(ranks: usize) -> usize {
    cores::of_process(ranks).unwrap_or_else(|| default_per_rank(ranks))
}

/// Returns the default number of compute threads of each of `ranks` ranks of this process: the cores divided by the ranks, at least one.
pub fn default_per_rank(ranks: usize) -> usize {
    std::thread::available_parallelism().map_or(1, usize::from).checked_div(ranks).unwrap_or(1).max(1)
}

/// Sets the number of compute threads of every rank of this process, and returns the number in effect.
///
/// The first call counts, and variables that are already in the environment take precedence. Call it first in `main`;
/// [`World`](crate::World) calls it for you if your program starts with that. If the process already has several
/// threads, it leaves the environment alone and prints a note on stderr.
///
/// ```standalone_crate
/// candle_dist::threads::settle(3); // the first statement of the program
/// assert!(std::env::var_os("CANDLE_NUM_THREADS").is_some() && std::env::var_os("RAYON_NUM_THREADS").is_some());
/// ```
pub fn settle(per_rank: usize) -> usize {
    *SETTLED.get_or_init(|| {
        if is_only_thread() {
            // SAFETY: this is the only thread of the process, and it starts none before `set` returns.
            unsafe { set(per_rank) }
        } else if unset().next().is_some()
            && let Some(consequence) = consequence(per_rank.max(1))
        {
            eprintln!(
                "candle-dist: this process has several threads already, so candle {consequence}; set {} in the environment, or \
                 call candle_dist::threads::settle first in main",
                VARIABLES.join(" and ")
            );
        }
        in_force()
    })
}

/// Like [`settle`], in a process that may have several threads.
///
/// # Safety
/// While this runs, no other thread may read or change the environment except through `std::env`. C code reads it in
/// `getenv` and its callers, such as the host name resolver and the functions for local time.
pub unsafe fn settle_among_threads(per_rank: usize) -> usize {
    *SETTLED.get_or_init(|| {
        // SAFETY: guaranteed by the caller.
        unsafe { set(per_rank) };
        in_force()
    })
}

/// Returns what follows if the variables stay unset.
fn consequence(wanted: usize) -> Option<String> {
    let threads = in_force();
    if threads != wanted {
        return Some(format!("computes with {threads} threads for each rank, where {wanted} are wanted"));
    }
    let is_unset = std::env::var_os(VARIABLES[1]).is_none();
    is_unset.then(|| "counts the cores of the machine in each matrix product, which takes time".to_string())
}

/// Returns the variables that are not set.
fn unset() -> impl Iterator<Item = &'static str> {
    VARIABLES.into_iter().filter(|name| std::env::var_os(name).is_none())
}

/// Sets the variables that are not set.
///
/// # Safety
/// As for [`settle_among_threads`].
unsafe fn set(per_rank: usize) {
    let per_rank = per_rank.max(1).to_string();
    let others = GPU.iter().copied().chain([SPIN]).filter(|(name, _)| std::env::var_os(name).is_none());
    for (name, value) in unset().map(|name| (name, per_rank.as_str())).chain(others) {
        // SAFETY: guaranteed by the caller.
        unsafe { std::env::set_var(name, value) };
    }
}

/// Returns whether GPUs have fewer queues for streams than we ask for.
#[cfg(feature = "nccl")]
pub(crate) fn has_few_queues() -> bool {
    std::env::var(CONNECTIONS).map_or(true, |text| text.trim() != QUEUES)
}

/// Says on stderr, once, which variables of GPUs are not as they should be, and what follows.
#[cfg(feature = "nccl")]
pub(crate) fn note_gpu_variables() {
    static ONCE: std::sync::Once = std::sync::Once::new();
    if let Some(wanted) = gpu_variables(|name| std::env::var(name).ok()) {
        ONCE.call_once(|| {
            eprintln!(
                "candle-dist: calls on GPUs may hold up each other; set {wanted} in the environment, or call \
                 candle_dist::threads::settle first in main, before the first device is made"
            );
        });
    }
}

/// Returns what should be in the environment for GPUs, and is not. The user may choose whether NCCL connects inside of calls, and
/// queues from 8 on.
#[cfg(any(feature = "nccl", test))]
fn gpu_variables(lookup: impl Fn(&str) -> Option<String>) -> Option<String> {
    let is_fine = |name: &str| match lookup(name) {
        None => false,
        Some(text) => name != CONNECTIONS || text.trim().parse::<u32>().is_ok_and(|count| count >= 8),
    };
    let missing =
        [(CONNECTIONS, QUEUES), ("NCCL_RUNTIME_CONNECT", "0")].into_iter().filter(|(name, _)| !is_fine(name));
    let missing: Vec<String> = missing.map(|(name, value)| format!("{name}={value}")).collect();
    (!missing.is_empty()).then(|| missing.join(" and "))
}

/// Returns how many threads candle's elementwise ops use.
fn in_force() -> usize {
    let given = std::env::var(VARIABLES[0]).ok().and_then(|n| n.parse().ok()).filter(|&n| n > 0);
    given.unwrap_or_else(candle_core::utils::get_num_threads)
}

/// Returns whether this process has a single thread; false if the system cannot say.
fn is_only_thread() -> bool {
    cfg!(windows) // there, any thread may change the environment
        || (cfg!(target_os = "linux") && std::fs::read_dir("/proc/self/task").is_ok_and(|tasks| tasks.count() == 1))
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use std::process::Command;

    /// Runs this test program again as `as_child` with `how`, and returns what it prints on both streams.
    fn child(how: &str) -> [String; 2] {
        let mut command = Command::new(std::env::current_exe().unwrap());
        command.args(["threads::tests::as_child", "--exact", "--nocapture", "--test-threads", "1"]);
        let names = VARIABLES.iter().chain([&SPIN.0]).chain(GPU.iter().map(|(name, _)| name));
        names.for_each(|name| _ = command.env_remove(name));
        let output = command.env("SETTLE", how).output().unwrap();
        assert!(output.status.success(), "{output:?}");
        [output.stdout, output.stderr].map(|bytes| String::from_utf8(bytes).unwrap())
    }

    #[test]
    fn as_child() {
        let settled = match std::env::var("SETTLE").as_deref() {
            Ok("safe") => settle(7),
            // SAFETY: the harness's thread only waits for this one.
            Ok("among threads") => unsafe { settle_among_threads(7) },
            _ => return,
        };
        let names = [VARIABLES[0], VARIABLES[1], SPIN.0];
        println!("SETTLED {settled} {:?}", names.map(|name| std::env::var(name).ok()));
        println!("GPU {}", GPU.iter().all(|(name, value)| std::env::var(name).is_ok_and(|it| it == *value)));
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_environment_is_left_alone_while_other_threads_may_read_it() {
        // The test harness has its own thread.
        let [out, err] = child("safe");
        assert!(out.contains("[None, None, None]"), "{out}");
        assert!(
            err.contains("where 7 are wanted")
                && err.contains("set CANDLE_NUM_THREADS and RAYON_NUM_THREADS"),
            "{err}"
        );
        let [out, err] = child("among threads");
        assert!(out.contains("SETTLED 7 [Some(\"7\"), Some(\"7\"), Some(\"1000\")]"), "{out}");
        assert!(!err.contains("are wanted"), "{err}");
        assert!(out.contains("GPU true"), "{out}");
    }

    #[test]
    fn what_gpus_need_in_the_environment_is_named() {
        let of = |connections: Option<&str>, connect: Option<&str>| {
            gpu_variables(|name| if name == CONNECTIONS { connections } else { connect }.map(str::to_string))
        };
        assert_eq!(of(Some("32"), Some("0")), None);
        assert_eq!(of(Some("8"), Some("1")), None, "the user has chosen");
        assert_eq!(of(Some("1"), Some("0")).unwrap(), "CUDA_DEVICE_MAX_CONNECTIONS=32");
        assert!(of(None, None).unwrap().ends_with("and NCCL_RUNTIME_CONNECT=0"));
    }
}
