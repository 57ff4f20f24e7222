//! The thread that MPI is started and ended on, and that looks after it in between.
use super::Settings;
use super::engine::Engine;
use super::wire::Wire;
use crate::control::Control;
use crate::{Error, Result};
use ferrompi::{Communicator, Mpi, ThreadLevel};
use std::sync::Arc;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the thread sleeps between two looks while messages are under way.
const SHORT: Duration = Duration::from_micros(50);
/// How long it sleeps at most, when nothing is.
const LONG: Duration = Duration::from_millis(1);

/// How long the end waits for ranks to take what was sent to them; only messages that nobody receives take long.
const FAREWELL: Duration = Duration::from_secs(10);

/// MPI, from its start to its end, which is when this is dropped.
pub(super) struct Keeper {
    engine: Arc<Engine>,
    /// The thread, and what it ends with; gone at the end.
    thread: Option<(mpsc::Sender<()>, JoinHandle<()>)>,
}

impl Keeper {
    /// Starts MPI, or uses the communicator of a program that has done so.
    pub(super) fn start(control: Arc<Control>, crowded: bool, settings: Settings<'_>) -> Result<Self> {
        let Settings { comm, most_bytes } = settings;
        let given = comm.map(Communicator::duplicate).transpose().map_err(refused)?;
        let (ended, end) = mpsc::channel();
        let (started, start) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("mpi".to_string())
            .spawn(move || {
                let ours = given.is_none();
                let made = connect(&control, given).and_then(|(mpi, comm)| {
                    let wire = Wire::new(comm, most_bytes);
                    let wire = wire.map_err(|error| Error::Unsupported(format!("MPI: {error}")))?;
                    Ok((mpi, Arc::new(Engine::new(control, wire, crowded))))
                });
                let (mpi, engine) = match made {
                    Ok(made) => made,
                    Err(error) => return drop(started.send(Err(error))),
                };
                if started.send(Ok(engine.clone())).is_ok() {
                    tend(&engine, &end);
                    finish(&engine, mpi, ours);
                }
            })
            .map_err(|error| Error::Unsupported(format!("a thread for MPI could not be started: {error}")))?;
        let engine = start.recv().map_err(|_| Error::Unsupported("the thread for MPI is gone".into()))??;
        Ok(Self { engine, thread: Some((ended, thread)) })
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }
}

impl Drop for Keeper {
    fn drop(&mut self) {
        if let Some((end, thread)) = self.thread.take() {
            drop(end);
            // If it panicked, that has been printed.
            let _ = thread.join();
        }
    }
}

/// MPI, if it is ours, and the communicator of all ranks.
fn connect(control: &Control, given: Option<Communicator>) -> Result<(Option<Mpi>, Communicator)> {
    let (mpi, comm) = match given {
        Some(comm) => (None, comm),
        None => {
            if Mpi::is_initialized() {
                return Err(Error::Unsupported(
                    "this program has started MPI itself; give its communicator to the engine (backend::mpi::Settings)"
                        .to_string(),
                ));
            }
            let mpi = Mpi::init_thread(ThreadLevel::Serialized).map_err(refused)?;
            if mpi.thread_level() < ThreadLevel::Serialized {
                return Err(Error::Unsupported(
                    "this MPI cannot be called from several threads; use one that was built with thread support".into(),
                ));
            }
            let comm = mpi.world();
            (Some(mpi), comm)
        }
    };
    let (rank, size) = (comm.rank() as usize, comm.size() as usize);
    if (rank, size) != (control.rank(), control.size()) {
        return Err(Error::Unsupported(format!(
            "MPI says rank {rank} of {size}, the launcher rank {} of {}; start all ranks with one mpirun",
            control.rank(),
            control.size()
        )));
    }
    Ok((mpi, comm))
}

fn refused(error: ferrompi::Error) -> Error {
    Error::Unsupported(format!("MPI: {error}"))
}

/// Looks after the engine until the end, which comes when this rank has said goodbye; what others still need of it is
/// sent first.
fn tend(engine: &Engine, end: &mpsc::Receiver<()>) {
    let (mut nap, mut deadline) = (SHORT, None);
    loop {
        nap = match engine.check().and_then(|()| engine.tend()) {
            Ok(true) => SHORT,
            Ok(false) => LONG.min(nap * 2),
            Err(_) => LONG,
        };
        match deadline {
            Some(deadline) if engine.check().is_err() || !engine.is_busy() || Instant::now() >= deadline => return,
            Some(_) => std::thread::sleep(SHORT),
            None if end.recv_timeout(nap) == Err(RecvTimeoutError::Disconnected) => {
                deadline = Some(Instant::now() + FAREWELL);
            }
            None => {}
        }
    }
}

/// Ends MPI if it is ours and all is well.
fn finish(engine: &Engine, mpi: Option<Mpi>, ours: bool) {
    let Some(wire) = engine.take_wire() else { return };
    if engine.check().is_err() || engine.is_busy() {
        // MPI may still use memory of ours, and its end would wait for ranks that are gone.
        wire.abandon();
        std::mem::forget(mpi);
    } else if let Err(error) = wire.close() {
        eprintln!("MPI did not end well: {error}");
        std::mem::forget(mpi);
    } else if ours {
        drop(mpi);
    }
}
