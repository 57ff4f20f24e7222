//! How processes meet. Each writes a file that names its test and the number of its world, and reads the files of the others.
use super::start::Job;
use crate::harness::Ranks;
use candle_dist::WorldError;
use parking_lot::Mutex;
use serde::{Deserialize, Serialize};
use std::fs;
use std::net::TcpListener;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

/// How long a process sleeps between two looks for the others.
const LOOK: Duration = Duration::from_micros(300);

/// A world of a test: the test, and how many worlds it had before. Tests run in the order of their names.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
struct Place {
    test: String,
    nth: usize,
}

/// What a process says when it begins a world.
#[derive(Debug, Serialize, Deserialize)]
struct Begun {
    place: Place,
    label: String,
    world: usize,
    /// Where rank 0 will listen.
    port: u16,
}

/// How a process ended a world: the results of its ranks, or the rank that failed and its message.
type Ended = Result<Vec<Vec<u8>>, (usize, String)>;

/// How many worlds and folders the current test has had.
static CURRENT: Mutex<Current> = Mutex::new(Current { test: String::new(), worlds: 0, folders: 0 });

struct Current {
    test: String,
    worlds: usize,
    folders: usize,
}

/// Returns what `f` makes of the counts of the test on this thread.
fn current<R>(f: impl FnOnce(&mut Current) -> R) -> R {
    let mut current = CURRENT.lock();
    let thread = thread::current();
    let test = thread.name().unwrap_or_default();
    if current.test != test {
        *current = Current { test: test.to_string(), worlds: 0, folders: 0 };
    }
    f(&mut current)
}

/// Returns a name for the next folder of the test on this thread.
pub(super) fn next_folder() -> String {
    current(|current| {
        current.folders += 1;
        format!("{}-{}", current.test.replace("::", "-"), current.folders)
    })
}

/// Returns a port that is free. Those of connections that others open meanwhile are above these.
fn free_port() -> u16 {
    const FIRST: usize = 10_000;
    const COUNT: usize = 20_000;
    static TRIED: AtomicUsize = AtomicUsize::new(0);
    let next = || {
        let nth = std::process::id() as usize * 64 + TRIED.fetch_add(1, Ordering::Relaxed);
        u16::try_from(FIRST + nth % COUNT).ok().filter(|&port| TcpListener::bind(("127.0.0.1", port)).is_ok())
    };
    (0..COUNT).find_map(|_| next()).unwrap_or(0)
}

/// A world that all processes have begun.
pub(super) struct Meeting<'a> {
    job: &'a Job,
    ranks: &'a Ranks,
    place: Place,
    /// Where rank 0 listens.
    pub(super) port: u16,
}

impl<'a> Meeting<'a> {
    /// Waits until all processes begin this world. Says what another one does instead.
    pub(super) fn begin(job: &'a Job, ranks: &'a Ranks) -> Result<Self, String> {
        if job.is_broken.load(Ordering::Relaxed) {
            return Err("an earlier world hangs, so no other one begins".to_string());
        }
        let place = current(|current| {
            current.worlds += 1;
            Place { test: current.test.clone(), nth: current.worlds }
        });
        let port = if job.rank == 0 { free_port() } else { 0 };
        let (label, world) = (ranks.label().to_string(), ranks.world());
        let mut meeting = Self { job, ranks, place, port };
        write(job, "begun", &Begun { place: meeting.place.clone(), label: label.clone(), world, port });
        for rank in 0..job.size {
            let begun: Begun =
                meeting.await_file("begun", rank, |begun: &Begun| begun.place >= meeting.place)?;
            if begun.place != meeting.place {
                return Err(format!(
                    "rank {rank} has failed in this test: it is in {} already",
                    begun.place.test
                ));
            }
            if (&begun.label, begun.world) != (&label, world) {
                let Begun { label: theirs, world: of, .. } = begun;
                // Random cases differ without a seed.
                let fix = "give all processes the same PROPTEST_RNG_SEED";
                return Err(format!("{world} ranks, but rank {rank} begins {of} ranks [{theirs}]; {fix}"));
            }
            if rank == 0 {
                meeting.port = begun.port;
            }
        }
        Ok(meeting)
    }

    /// Runs `f` on one process after another, since they share folders. Returns when all have run it.
    pub(super) fn in_turn<T>(&self, f: impl FnOnce() -> Result<T, WorldError>) -> Result<T, WorldError> {
        let wait = |rank: usize| {
            let turned = self.await_file("turned", rank, |place: &Place| *place == self.place);
            turned.map_err(|message| self.ranks.fail(rank, message))
        };
        if self.job.rank > 0 {
            wait(self.job.rank - 1)?;
        }
        let made = f();
        write(self.job, "turned", &self.place);
        wait(self.job.size - 1)?;
        made
    }

    /// Waits until all processes have ended this world. Returns the results of each, or the failure that came first.
    pub(super) fn end(
        self,
        ended: Result<Vec<Vec<u8>>, WorldError>,
    ) -> Result<Vec<Vec<Vec<u8>>>, WorldError> {
        let ended: Ended = ended.map_err(|error| {
            // The harness of the tests shows it with the output of this process.
            eprintln!("process {} of {}: {error}", self.job.rank, self.job.size);
            (error.rank, error.message)
        });
        write(self.job, "ended", &(&self.place, ended));
        let (mut results, mut failures) = (Vec::new(), Vec::new());
        for rank in 0..self.job.size {
            let (_, ended) = self
                .await_file("ended", rank, |(place, _): &(Place, Ended)| *place == self.place)
                .map_err(|message| self.ranks.fail(rank, message))?;
            match ended {
                Ok(result) => results.push(result),
                Err((blamed, message)) => failures.push((rank, blamed, message)),
            }
        }
        if failures.iter().any(|(_, _, message)| message.contains(candle_prove::Ranks::LATE)) {
            self.job.is_broken.store(true, Ordering::Relaxed);
        }
        // The rank that failed knows the most.
        let first = failures.iter().position(|(rank, blamed, _)| rank == blamed).unwrap_or(0);
        match failures.into_iter().nth(first) {
            Some((_, rank, message)) => Err(WorldError::new(rank, message)),
            None => Ok(results),
        }
    }

    /// Waits for a file of a process that fits.
    fn await_file<T: for<'de> Deserialize<'de>>(
        &self,
        what: &str,
        rank: usize,
        fits: impl Fn(&T) -> bool,
    ) -> Result<T, String> {
        // Each of the others may run the world among threads before.
        let limit = self.ranks.until_late() * (self.job.size as u32 + 1);
        let until = Instant::now() + limit;
        let path = file(self.job, what, rank);
        loop {
            let read = fs::read(&path).ok().and_then(|bytes| postcard::from_bytes::<T>(&bytes).ok());
            match read.filter(&fits) {
                Some(read) => return Ok(read),
                None if Instant::now() < until => thread::sleep(LOOK),
                None => {
                    self.job.is_broken.store(true, Ordering::Relaxed);
                    return Err(format!("rank {rank} has not {what} this world within {limit:?}"));
                }
            }
        }
    }
}

/// Waits until all processes have run all their tests; returns whether they have.
pub(super) fn wait_for_the_end(job: &Job, wait: Duration) -> bool {
    write(job, "left", &());
    let until = Instant::now() + wait;
    loop {
        if (0..job.size).all(|rank| file(job, "left", rank).exists()) {
            return true;
        }
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(LOOK);
    }
}

fn file(job: &Job, what: &str, rank: usize) -> PathBuf {
    job.folder.join(format!("{what}-{rank}"))
}

/// Replaces a file of this process: the others see all of the new one or all of the old one.
fn write(job: &Job, what: &str, value: &impl Serialize) {
    let (path, new) = (file(job, what, job.rank), file(job, "new", job.rank));
    let bytes = postcard::to_stdvec(value).unwrap_or_else(|error| panic!("{what}: {error}"));
    let written = fs::write(&new, bytes).and_then(|()| fs::rename(&new, &path));
    written.unwrap_or_else(|error| panic!("{}: {error}", path.display()));
}
