//! The background thread, which starts and ends MPI, and drives it in between.
use super::Settings;
use super::agree::agree;
use super::driver::Driver;
use super::host::{Shortage, shortages};
use super::native::{self, Comm, MpiError, ThreadLevel};
use super::place::{self, Milestone};
use super::wire::Wire;
use crate::control::{Control, LAG};
use crate::launch::host_name;
use crate::link::within;
use crate::warning;
use crate::{Error, Result};
use parking_lot::Mutex;
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::time::{Duration, Instant};

/// How long the thread sleeps between two checks while messages are in flight.
const SHORT: Duration = Duration::from_micros(50);
/// How long it sleeps at most when no message is.
const LONG: Duration = Duration::from_millis(1);
/// How often it looks for writes that wait.
const WRITES: Duration = Duration::from_millis(100);

/// How often a start checks for a failure of the world.
const LOOK: Duration = Duration::from_millis(5);
/// The most time that MPI has to end. It has no more than it had to start.
const END: Duration = Duration::from_secs(60);

/// How long the end of a rank in a program with an MPI of its own waits while nothing moves.
const FAREWELL: Duration = Duration::from_secs(10);

/// MPI, from its start to its end, when this is dropped.
pub(super) struct Keeper {
    driver: Arc<Driver>,
    /// Whether this starts and ends MPI.
    ours: bool,
    /// The sender that ends the thread, and what the thread tells; `None` at the end.
    thread: Option<(mpsc::Sender<()>, Mutex<mpsc::Receiver<KeeperEvent>>)>,
}

/// What the thread tells.
enum KeeperEvent {
    /// This rank is about to start MPI, like all others.
    Agreed,
    Started(Result<Arc<Driver>>),
    /// This rank needs MPI no more, and ends it.
    Ending,
}

impl Keeper {
    /// Starts MPI, or uses the communicator of a program that has done so.
    ///
    /// An error on some rank is the error of all, so no rank stays in an MPI call for ranks that never arrive.
    pub(super) fn start(control: Arc<Control>, crowded: bool, settings: Settings) -> Result<Self> {
        let ours = settings.comm.is_none();
        let (ended, end) = mpsc::channel();
        let (tell, events) = mpsc::channel();
        let watched = control.clone();
        std::thread::Builder::new()
            .name("mpi".to_string())
            .spawn(move || {
                let driver = match connect(&control, settings, |event| drop(tell.send(event))) {
                    Ok(wire) => Arc::new(Driver::new(control, wire, crowded)),
                    // MPI is not ended: that would wait for the other ranks, which may never end theirs.
                    Err(error) => return drop(tell.send(KeeperEvent::Started(Err(error)))),
                };
                if tell.send(KeeperEvent::Started(Ok(driver.clone()))).is_ok() {
                    tend(&driver, &end);
                    wind_up(&driver, false);
                    let _ = tell.send(KeeperEvent::Ending);
                    finish(&driver, ours);
                }
            })
            .map_err(|error| Error::Unsupported(format!("a thread for MPI could not be started: {error}")))?;
        let _stage = watched.stage(&format!("starting MPI on {}", host_name()));
        // The others may come late, and then it is said before who is missing. From then on it is MPI that takes the time.
        let mut limit = watched.start_timeout();
        let mut deadline = within(limit.saturating_add(2 * LAG));
        let driver = loop {
            match events.recv_timeout(LOOK) {
                Ok(KeeperEvent::Agreed) => {
                    limit = watched.init_timeout();
                    // Rank 0 speaks for all, if it can.
                    deadline =
                        within(limit.saturating_add(if watched.rank() == 0 { Duration::ZERO } else { LAG }));
                }
                Ok(KeeperEvent::Started(driver)) => break driver?,
                Ok(KeeperEvent::Ending) | Err(RecvTimeoutError::Disconnected) => {
                    return Err(Error::Unsupported("the thread for MPI is gone".into()));
                }
                // The thread may be stuck in an MPI call; the process ends without it.
                Err(RecvTimeoutError::Timeout) => {
                    if let Some(failure) = watched.failure() {
                        return Err(Error::Group(failure));
                    }
                    if Instant::now() >= deadline {
                        return Err(watched.fail(place::not_started(&watched, limit)));
                    }
                }
            }
        };
        Ok(Self { driver, ours, thread: Some((ended, Mutex::new(events))) })
    }

    pub(super) fn driver(&self) -> &Arc<Driver> {
        &self.driver
    }

    /// Does what others still need of this rank, which has said goodbye, until it may end.
    pub(super) fn wind_up(&self) {
        wind_up(&self.driver, self.ours);
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        let Some((end, events)) = self.thread.take() else { return };
        drop(end);
        let (events, limit) = (events.into_inner(), self.driver.control().init_timeout().min(END));
        // The end of MPI waits for ranks that end as well, and that of MPICH hangs now and then. When the thread is over, maybe by a
        // panic, that has been printed already.
        while let Ok(KeeperEvent::Ending) = events.recv() {
            if let Err(RecvTimeoutError::Timeout) = events.recv_timeout(limit) {
                warning::print(format_args!(
                    "note: MPI did not end within {limit:?}, so rank {} ends without it; its results are out",
                    self.driver.control().rank()
                ));
                return;
            }
        }
    }
}

/// Creates the wire over all ranks, when all agree on ranks and settings. Tells before any rank waits in MPI, and tells the other ranks
/// how far this one is.
fn connect(control: &Control, settings: Settings, tell: impl Fn(KeeperEvent)) -> Result<Wire> {
    match settings.comm {
        Some(_) => check_given()?,
        None => check_unstarted()?,
    }
    // Ranks also wait for each other in the start of MPI, so all start it or none does.
    place::tell(control)?;
    let found = agree(control, "the start of MPI", &settings.text(), || {
        shortages(&place::all(control), settings.most_sharing)
    })?;
    Milestone::Begun.tell(control)?;
    tell(KeeperEvent::Agreed);
    let (comm, most_sharing) = match settings.comm {
        // The ranks wait for each other when shared memory is freed. In a program with an MPI of its own, other messages
        // might have to arrive before.
        Some(comm) => (comm, 1),
        None => {
            let shortage = Shortage::on(&host_name(), &found)?;
            shortage.iter().for_each(|shortage| shortage.avoid(control.rank()));
            (started()?, if shortage.is_none() { settings.most_sharing } else { 1 })
        }
    };
    Milestone::Started.tell(control)?;
    let (rank, size) = comm.place().map_err(refused)?;
    if (rank, size) != (control.rank(), control.size()) {
        return Err(Error::Unsupported(format!(
            "MPI says rank {rank} of {size}, the launcher rank {} of {}; start all ranks with one mpirun, of the MPI that the program was \
             built with",
            control.rank(),
            control.size()
        )));
    }
    // From here on the ranks wait for each other in MPI, so all must be free of errors.
    agree(control, "the connection of MPI", "", || Ok(Vec::new()))?;
    let private = comm.duplicate().map_err(refused)?;
    Milestone::Connected.tell(control)?;
    let wire = Wire::new(private, size, settings.most_bytes, most_sharing).map_err(refused)?;
    Milestone::Sharing.tell(control)?;
    // A rank that returns at once must not end the start of the others.
    agree(control, "the end of MPI's start", "", || Ok(Vec::new()))?;
    Ok(wire)
}

/// Refuses an MPI that the program has started, unless it allows calls from several threads.
fn check_given() -> Result<()> {
    let (is_started, is_ended) = native::state().map_err(refused)?;
    if !is_started || is_ended {
        let state = if is_ended { "has ended" } else { "has not started" };
        return Err(Error::Unsupported(format!(
            "the communicator in mpi::Settings is of an MPI that {state}"
        )));
    }
    let level = native::level().map_err(refused)?;
    if level < ThreadLevel::Multiple {
        let wanted = ThreadLevel::Multiple;
        return Err(Error::Unsupported(format!(
            "the program started MPI with {level}, but the backend calls it from a thread of its own; start it with {wanted}"
        )));
    }
    Ok(())
}

/// Refuses to start MPI if it was started before.
fn check_unstarted() -> Result<()> {
    let (is_started, is_ended) = native::state().map_err(refused)?;
    if is_ended {
        return Err(Error::Unsupported("MPI has ended in this process; it can be started once".into()));
    }
    if is_started {
        return Err(Error::Unsupported(
            "this program has started MPI itself; pass its communicator to the backend (backend::mpi::Settings)".into(),
        ));
    }
    Ok(())
}

/// Starts MPI and returns the communicator of all ranks.
fn started() -> Result<Comm> {
    let level = native::start().map_err(refused)?;
    if level < ThreadLevel::Serialized {
        let wanted = ThreadLevel::Serialized;
        return Err(Error::Unsupported(format!(
            "this MPI offers {level}, so it cannot be called from several threads; use one that offers {wanted}"
        )));
    }
    Ok(Comm::world())
}

fn refused(error: MpiError) -> Error {
    Error::Unsupported(error.to_string())
}

/// Drives the backend until the end.
fn tend(driver: &Driver, end: &mpsc::Receiver<()>) {
    let (mut nap, mut checked) = (SHORT, Instant::now());
    while end.recv_timeout(nap) != Err(RecvTimeoutError::Disconnected) {
        nap = match driver.check().and_then(|()| driver.tend()) {
            Ok(true) => SHORT,
            Ok(false) => LONG.min(nap * 2),
            Err(_) => LONG,
        };
        if checked.elapsed() >= WRITES {
            // All ranks hear of an error.
            let _ = driver.check_writes();
            checked = Instant::now();
        }
    }
}

/// Sends the data that others still need, and receives what nobody has received. If it `waits`, it ends when no rank has
/// anything under way.
///
/// In a program with an MPI of its own, a rank does not wait for the ends of others: they may wait for messages of that
/// program. A message for a rank that has ended then counts as lost after a while.
fn wind_up(driver: &Driver, waits: bool) {
    let (mut nap, mut moved, mut farewell) = (SHORT, Instant::now(), None);
    loop {
        let Ok(has_moved) = driver.wind_up() else { return };
        if has_moved {
            (nap, moved) = (SHORT, Instant::now());
        }
        match (driver.is_busy(), &mut farewell) {
            (true, _) if !waits && moved.elapsed() >= FAREWELL => return,
            (true, None) => {}
            (false, _) if !waits => return,
            // There may be more letters.
            _ if has_moved => {}
            // Nothing of this rank is under way. When this holds for all, nobody needs this rank any more.
            (false, None) => match driver.start_farewell() {
                Ok(barrier) => farewell = Some(barrier),
                Err(_) => return,
            },
            (_, Some(barrier)) => match driver.is_over(barrier) {
                Ok(false) => {}
                Ok(true) | Err(_) => return,
            },
        }
        std::thread::sleep(nap);
        nap = LONG.min(nap * 2);
    }
}

/// Ends MPI if this thread started it and there was no failure.
fn finish(driver: &Driver, ours: bool) {
    // A rank that has ended reads no letters.
    driver.give_up_letters();
    let Some(wire) = driver.take_wire() else { return };
    if driver.check().is_err() || driver.is_busy() {
        // MPI may still use memory of this process, and its end would wait for ranks that are gone.
        return wire.abandon();
    }
    let closed = wire.close();
    if let Err(error) = closed.and_then(|()| if ours { native::end() } else { Ok(()) }) {
        warning::print(format_args!("MPI did not end well: {error}"));
    }
}
