//! The backend on which tests run.
//!
//! | `CANDLE_TEST_BACKEND` | ranks |
//! |---|---|
//! | `threads` | threads on the host; with `CANDLE_TEST_DEVICE=cuda`, threads that share the first GPU |
//! | `nccl` | threads with a GPU each |
//! | `nccl-sim` | the same, on the simulated driver of `scripts/nccl-sim.sh` |
//! | `mpi` | the processes that mpirun started (see `scripts/mpi-suites.sh`) |
//! | not set | those of `nccl` if there are several GPUs, those that share a GPU if there is one, and else those on the host. GPUs are looked for in builds with the cargo feature `nccl`, and if `CANDLE_TEST_DEVICE` is not set |
//!
//! `CANDLE_TEST_WORLD` sets the number of ranks.
use crate::skip;
use candle_dist::World;
use std::env;

/// Returns the name of the backend on which tests run, as [`Backend::name`] does.
///
/// [`Backend::name`]: candle_dist::backend::Backend::name
///
/// # Panics
/// If the backend is unknown.
pub fn backend_name() -> &'static str {
    match env::var("CANDLE_TEST_BACKEND").as_deref() {
        Err(_) if unasked() > 1 => "nccl",
        Err(_) | Ok("threads") => "threads",
        Ok("nccl" | "nccl-sim") => "nccl",
        Ok("mpi") if cfg!(feature = "mpi") => "mpi",
        Ok("mpi") => panic!("CANDLE_TEST_BACKEND=mpi needs the cargo feature mpi of test-utils"),
        Ok(other) => panic!("CANDLE_TEST_BACKEND={other}; use threads, mpi, nccl or nccl-sim"),
    }
}

/// Returns whether tests run over NCCL.
///
/// # Panics
/// If the backend is unknown.
pub fn over_nccl() -> bool {
    backend_name() == "nccl"
}

/// Returns whether ranks are processes, over MPI.
///
/// # Panics
/// If the backend is unknown.
pub fn over_mpi() -> bool {
    backend_name() == "mpi"
}

/// Returns whether ranks are processes. If so, the test is reported as skipped, as by [`skip`]: `why` says what it needs
/// that ranks share only among threads.
///
/// [`skip`]: crate::skip
///
/// # Panics
/// If the backend is unknown.
pub fn skip_among_processes(why: &str) -> bool {
    if over_mpi() {
        skip(why);
    }
    over_mpi()
}

/// Returns the sizes of worlds to test: `sizes` on the host. Over NCCL, it is as many ranks as there are GPUs; if that is
/// below the smallest of `sizes`, there is none, and the test is reported as skipped.
///
/// # Panics
/// If the backend is unknown or not in this build, or `CANDLE_TEST_WORLD` is no number.
pub fn worlds(sizes: impl IntoIterator<Item = usize>) -> Vec<usize> {
    let sizes: Vec<usize> = sizes.into_iter().collect();
    let least = sizes.iter().copied().min().unwrap_or(0);
    let wanted = env::var("CANDLE_TEST_WORLD").ok().map(|text| match text.parse() {
        Ok(size) => size,
        Err(_) => panic!("CANDLE_TEST_WORLD={text} is no number of ranks"),
    });
    let size: usize = match (wanted, over_nccl()) {
        (None, false) => return sizes,
        (Some(size), _) => size,
        (None, true) => gpus(),
    };
    if size < least {
        skip(&format!("needs {least} ranks, and there are {size}"));
    }
    [size].into_iter().filter(|&size| size >= least).collect()
}

/// Returns whether a world of this size can run; if not, the test is reported as skipped, as by [`skip`].
///
/// [`skip`]: crate::skip
///
/// # Panics
/// If the backend is unknown or not in this build.
pub fn has_ranks(size: usize) -> bool {
    let found = if over_nccl() { gpus() } else { usize::MAX };
    if found < size {
        skip(&format!("needs {size} ranks, and there are {found}"));
    }
    size <= found
}

/// Returns the number of GPUs that tests use although nothing says on which backend and device they run.
fn unasked() -> usize {
    let is_told =
        ["CANDLE_TEST_BACKEND", "CANDLE_TEST_DEVICE"].iter().any(|name| env::var_os(name).is_some());
    if is_told || cfg!(not(feature = "nccl")) { 0 } else { gpus() }
}

#[cfg(feature = "nccl")]
fn gpus() -> usize {
    let found = (0..).take_while(|&ordinal| candle_core::Device::new_cuda_with_stream(ordinal).is_ok());
    static COUNT: std::sync::OnceLock<usize> = std::sync::OnceLock::new();
    let count = *COUNT.get_or_init(|| found.count());
    // Otherwise all tests would be skipped.
    if let Some(wanted) =
        env::var("SIM_GPUS").ok().filter(|_| env::var("CANDLE_TEST_BACKEND").is_ok_and(|is| is == "nccl-sim"))
    {
        assert_eq!(count.to_string(), wanted, "the simulated driver has this number of GPUs");
    }
    count
}

#[cfg(not(feature = "nccl"))]
fn gpus() -> usize {
    panic!("CANDLE_TEST_BACKEND=nccl needs the cargo feature nccl of test-utils")
}

/// Returns whether the ranks of the threads backend share a GPU.
///
/// # Panics
/// If `CANDLE_TEST_DEVICE` is unknown.
fn shares_gpu() -> bool {
    match env::var("CANDLE_TEST_DEVICE").as_deref() {
        Err(_) => unasked() == 1,
        Ok("cpu") if !over_nccl() => false,
        Ok("cuda") if !over_mpi() => !over_nccl(),
        Ok(other) => panic!("CANDLE_TEST_DEVICE={other} for the backend {}; use cpu or cuda", backend_name()),
    }
}

/// Returns a world of threads over the backend, each on a GPU of its own if there are enough.
#[cfg(feature = "nccl")]
pub(crate) fn open(size: usize) -> Result<World, String> {
    if shares_gpu() {
        let device =
            candle_core::Device::new_cuda_with_stream(0).map_err(|error| format!("no GPU: {error}"))?;
        return Ok(World::threads(size).devices(&[device]));
    }
    if !over_nccl() {
        return Ok(World::threads(size));
    }
    if gpus() < size {
        // A test cannot end as skipped from within, so its ranks run on the host, where it must pass too.
        skip(&format!("needs {size} GPUs, and there are {}; it runs on the host", gpus()));
        return Ok(World::threads(size));
    }
    let devices = (0..size).map(candle_core::Device::new_cuda_with_stream);
    let devices = devices.collect::<candle_core::Result<Vec<_>>>();
    let devices = devices.map_err(|error| format!("{size} ranks need {size} GPUs: {error}"))?;
    check_driver(&devices)?;
    Ok(World::nccl(devices))
}

/// Refuses a simulated driver where real GPUs are wanted, and real ones where simulated ones are.
#[cfg(feature = "nccl")]
fn check_driver(devices: &[candle_core::Device]) -> Result<(), String> {
    let wanted = env::var("CANDLE_TEST_BACKEND").unwrap_or_default();
    let name =
        |device: &candle_core::Device| device.as_cuda_device().ok()?.cuda_stream().context().name().ok();
    let simulated = devices.iter().filter_map(name).any(|name| name == "simulated GPU");
    match (wanted.as_str(), simulated) {
        ("nccl-sim", false) => {
            Err("CANDLE_TEST_BACKEND=nccl-sim, but the GPUs are real; use nccl".to_string())
        }
        ("nccl", true) => {
            Err("CANDLE_TEST_BACKEND=nccl, but the GPUs are simulated; use nccl-sim".to_string())
        }
        _ => Ok(()),
    }
}

#[cfg(not(feature = "nccl"))]
pub(crate) fn open(size: usize) -> Result<World, String> {
    match (over_nccl(), shares_gpu()) {
        (true, _) => Err(format!("{} GPUs", gpus())),
        (_, true) => Err("CANDLE_TEST_DEVICE=cuda needs the cargo feature nccl of test-utils".to_string()),
        _ => Ok(World::threads(size)),
    }
}
