//! Ranks of tests that are processes: each process of mpirun runs every test, and is one rank of each world.
//!
//! A world of n ranks takes the first n processes. All processes, also those without a rank, meet before each world and
//! after it (`meet`), through files in a folder of the job (`start`). So a world begins on all of them or on none, and
//! ends on all with the same failure. Results are sent to all processes (`sent`), if their type is known; for others,
//! each process also runs the world among threads, in its turn, and takes the results of the other ranks from there. A
//! world of more ranks than processes runs among threads of the first process, and counts as skipped.
mod meet;
mod sent;
mod start;

use crate::harness::Ranks;
use crate::skip;
use candle_dist::backend::mpi::Settings;
use candle_dist::init::{InitOptions, init_process_group_with};
use candle_dist::{RankContext, WorldError};
use meet::Meeting;
use parking_lot::Mutex;
use start::Job;
use std::fmt::Display;
use std::thread;
use std::time::Duration;

pub(crate) use start::shared_folder;

/// Runs a world of processes. This process has at most one of its ranks, and `on_rank` runs that rank. `among_threads` runs
/// all ranks as threads of this process.
pub(crate) fn run<T: 'static>(
    ranks: &Ranks,
    among_threads: impl FnOnce() -> Result<Vec<T>, WorldError>,
    on_rank: impl FnOnce(RankContext) -> Result<T, WorldError>,
) -> Result<Vec<T>, WorldError> {
    let (job, world) = (start::job(), ranks.world());
    let meeting = Meeting::begin(job, ranks).map_err(|message| ranks.fail(job.rank, message))?;
    let fits = (1..=job.size).contains(&world);
    job.count(fits);
    if !fits {
        skip(&format!("needs {world} processes, and there are {}; its ranks are threads", job.size));
    }
    let port = meeting.port;
    let mine = || {
        let ctx = open(job, world, port, ranks.longest_call()).map_err(|why| ranks.fail(job.rank, why))?;
        on_rank(ctx)
    };
    let has_rank = fits && job.rank < world;
    let Some(codec) = sent::codec::<T>() else {
        // Before the world of processes, which thus ends the run.
        let among_threads = meeting.in_turn(among_threads);
        let mine = if has_rank { Some(mine()) } else { None };
        let failure = mine.as_ref().and_then(|mine| mine.as_ref().err().cloned());
        meeting.end(failure.map_or(Ok(Vec::new()), Err))?;
        let mut results = among_threads?;
        if let Some(Ok(mine)) = mine {
            results[job.rank] = mine;
        }
        return Ok(results);
    };
    let results = match (has_rank, fits, job.rank) {
        (true, ..) => mine().map(|mine| vec![mine]),
        (_, false, 0) => among_threads(),
        _ => Ok(Vec::new()),
    };
    let sent = meeting.end(results.map(|results| results.iter().map(codec.encode).collect()))?;
    let results = sent.iter().flatten().map(|bytes| (codec.decode)(bytes));
    results.collect::<Result<_, String>>().map_err(|message| ranks.fail(job.rank, message))
}

/// Opens a world of the first processes, whose rank 0 listens at a port.
fn open(job: &Job, world: usize, port: u16, timeout: Duration) -> Result<RankContext, String> {
    let options = InitOptions::explicit(&format!("127.0.0.1:{port}"), job.rank, world).local(job.rank, world);
    // The name of the folder is of this job alone.
    let options = options.token(&format!("tests in {}", job.folder.display()));
    let settings = Settings::default().comm(job.of_first(world));
    let opened =
        init_process_group_with(options.timeout(timeout), |info, control| settings.start(info, control));
    opened.map_err(|error| error.to_string())
}

/// Runs a rank on a thread of its own with a closure that may borrow.
pub(crate) fn on_rank<T, E, F>(ctx: RankContext, f: &F) -> Result<T, WorldError>
where
    T: Send,
    E: Display,
    F: Fn(&RankContext) -> Result<T, E> + Sync,
{
    let (rank, failure) = (ctx.rank(), Mutex::new(None));
    let blame = |rank: usize, message: &str| {
        failure.lock().get_or_insert(WorldError::new(rank, message));
    };
    let result = thread::scope(|scope| {
        let thread =
            thread::Builder::new().name(format!("rank {rank}")).stack_size(candle_prove::Ranks::STACK_BYTES);
        let ran = thread.spawn_scoped(scope, || ctx.run(f, blame)).map(|thread| thread.join());
        ran.ok()?.ok()?
    });
    let nothing = || WorldError::new(rank, "no result");
    result.ok_or_else(|| failure.into_inner().unwrap_or_else(nothing))
}
