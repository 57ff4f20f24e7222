//! Joins the processes that a launcher started, and ends together with them.

use std::io;
use std::process::ExitCode;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use candle_dist::init::{BackendKind, InitOptions, LaunchInfo};
use candle_dist::{Error, init_process_group};

use super::ranks::{Ranks, Refusal};
use super::voice::{Grace, Voice, later_at_start};
use super::{BackendName, Patience};
use crate::cli::{self, Checked, FAILED, USAGE, UsageError, require};

/// How long other ranks wait for rank 0 to report an error before they connect: a launcher may end all when one ends.
const PAUSE: Duration = Duration::from_secs(1);

/// Of so many ranks, each speaks at a time of its own; a host has about as many.
const HOST: usize = 16;

/// The stack of a rank. candle walks a graph by recursion, and a page takes memory only when it is touched.
const STACK_BYTES: usize = 256 << 20;

/// A process that a launcher started, and its backend.
pub(super) struct Started {
    backend: BackendKind,
    info: LaunchInfo,
}

/// Returns which process this is of those that a launcher started for a backend; otherwise the status, after one of them has
/// printed why it cannot be.
pub(super) fn started(name: BackendName, cpu_only: Option<&str>) -> Result<Started, ExitCode> {
    let backend = check(name, cpu_only).map_err(|error| refuse(&error, true))?;
    let sentence = |error| {
        let name = if backend == BackendKind::Nccl { "nccl" } else { "mpi" };
        match error {
            Error::Init(sentence) => UsageError(format!("--backend {name}: {sentence}.")),
            error => UsageError(format!("--backend {name}: {error}.")),
        }
    };
    let info = LaunchInfo::from_env(&InitOptions::new()).map_err(|error| {
        // A launcher may give its variables to the processes of some hosts only.
        if let Some(rank @ 1..) = LaunchInfo::rank_from_env() {
            thread::sleep(later_at_start(rank % HOST, HOST));
        }
        cli::fail(sentence(error), USAGE)
    })?;
    if backend == BackendKind::Mpi {
        info.check_mpi().map_err(|error| refuse(&sentence(error), true))?;
    }
    Ok(Started { backend, info })
}

/// Checks that ranks can be processes over a backend.
///
/// # Errors
/// If the backend is not available or cannot run the `cpu_only` part.
fn check(name: BackendName, cpu_only: Option<&str>) -> Checked<BackendKind> {
    let (backend, name, is_built) = match name {
        BackendName::Nccl => (BackendKind::Nccl, "nccl", cfg!(feature = "nccl")),
        _ => (BackendKind::Mpi, "mpi", cfg!(feature = "mpi")),
    };
    if let (BackendKind::Nccl, Some(what)) = (backend, cpu_only) {
        return Err(UsageError(format!(
            "--backend nccl is not for this program: it has {what}, which only the CPU has; use threads or mpi."
        )));
    }
    require!(
        is_built,
        "--backend {name} is not in this build: build with --features {name}, or use threads."
    );
    Ok(backend)
}

/// Returns whether this is rank 0 of the processes that a launcher started, or a single process.
pub(crate) fn is_first() -> bool {
    LaunchInfo::rank_from_env().is_none_or(|rank| rank == 0)
}

/// Returns this process's number among those of its host; 0 without a launcher.
pub fn local_rank() -> usize {
    LaunchInfo::from_env(&InitOptions::new()).map_or(0, |info| info.local_rank)
}

/// Returns the number of processes of this host; 1 without a launcher.
pub fn local_size() -> usize {
    LaunchInfo::from_env(&InitOptions::new()).map_or(1, |info| info.local_size)
}

/// Prints the error of the command line; if processes share it, only rank 0 does.
pub(super) fn refuse(error: &UsageError, is_shared: bool) -> ExitCode {
    if is_shared && !is_first() {
        thread::sleep(PAUSE);
        return ExitCode::from(USAGE);
    }
    cli::fail(error, USAGE)
}

/// Connects to the other processes and runs as one of them. This happens once, since MPI cannot be started again.
pub(super) fn join(
    Started { backend, info }: &Started,
    threads: impl Fn(usize) -> usize,
    patience: Patience,
    run: impl Fn(&Ranks<'_>) -> anyhow::Result<bool> + Sync,
) -> ExitCode {
    let options = InitOptions::new().init_timeout(patience.to_meet()).timeout(patience.in_call());
    let threads = threads(info.local_size);
    let options = options.threads_per_rank(threads).lost_after(patience.lost_after());
    // Before this process starts any thread.
    candle_dist::threads::settle(threads);
    let voice = Arc::new(Voice::new(patience.lost_after()));
    let _grace = match Grace::start(&voice) {
        Ok(grace) => grace,
        Err(error) => return cli::fail(format_args!("signals cannot be watched: {error}"), FAILED),
    };
    let ctx = match init_process_group(*backend, options) {
        Ok(ctx) => ctx,
        Err(Error::Group(failure)) => {
            voice.tell(info.rank, &failure, &failure);
            return ExitCode::from(USAGE);
        }
        Err(error) => {
            voice.tell_start(info, &error);
            return ExitCode::from(USAGE);
        }
    };
    let group = ctx.group().clone();
    let as_rank = || {
        // Also if the rank panics.
        let _over = voice.over_at_end();
        ctx.run(|ctx| end(&Ranks::Process(ctx, patience), &voice, &run), |_, _| ())
    };
    let status = thread::scope(|scope| {
        let rank = thread::Builder::new().name(format!("rank {}", info.rank)).stack_size(STACK_BYTES);
        let rank = rank.spawn_scoped(scope, as_rank)?;
        voice.watch(info.rank, &group);
        drop(group);
        Ok::<_, io::Error>(rank.join().ok().flatten())
    });
    match status {
        Ok(status) => ExitCode::from(status.unwrap_or(FAILED)),
        Err(error) => cli::fail(format_args!("a thread for the rank could not be started: {error}"), FAILED),
    }
}

/// Returns the status of all ranks after the run, which rank 0 determines.
///
/// # Errors
/// If this rank or another one failed; one of them prints the error.
fn end(
    ranks: &Ranks<'_>,
    voice: &Voice,
    run: impl Fn(&Ranks<'_>) -> anyhow::Result<bool>,
) -> anyhow::Result<u8> {
    let ended = run(ranks).and_then(|ok| ranks.of_first(&if ok { 0 } else { FAILED }.to_string()));
    match ended {
        Ok(status) => Ok(status.parse()?),
        Err(error) => match error.downcast_ref::<Refusal>() {
            Some(refusal) => {
                if ranks.is_first() {
                    cli::failed(&error);
                }
                // The others end after rank 0 has printed.
                ranks.of_first("")?;
                Ok(refusal.status)
            }
            None => {
                match ranks.failure() {
                    Some((rank, failure)) => voice.tell(rank, &failure, format_args!("{error:#}")),
                    None if cli::is_unread(&error) => {}
                    None => {
                        let failure = || ranks.failure().map(|(_, failure)| failure);
                        voice.tell_own(ranks.place(), failure, format_args!("{error:#}"));
                    }
                }
                Err(error)
            }
        },
    }
}
