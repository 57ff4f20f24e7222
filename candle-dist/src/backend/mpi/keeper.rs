//! The thread that MPI is started and ended on, and that looks after it in between.
use super::engine::Engine;
use super::wire::{MOST_BYTES, Wire};
use crate::control::Control;
use crate::{Error, Result};
use ferrompi::{Communicator, Mpi, ThreadLevel};
use parking_lot::Mutex;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::Duration;

/// How long the thread sleeps between two looks while messages are under way.
const SHORT: Duration = Duration::from_micros(50);
/// How long it sleeps at most, when nothing is.
const LONG: Duration = Duration::from_millis(1);

/// MPI, from its start to its end.
pub(super) struct Keeper {
    engine: Arc<Engine>,
    /// Told whether the world ended well; gone after that.
    end: Mutex<Option<(mpsc::Sender<bool>, JoinHandle<()>)>>,
}

impl Keeper {
    /// Starts MPI, or uses the communicator of a program that has done so.
    pub(super) fn start(control: Arc<Control>, crowded: bool, given: Option<&Communicator>) -> Result<Self> {
        let given = given.map(Communicator::duplicate).transpose().map_err(refused)?;
        let (ended, end) = mpsc::channel();
        let (started, start) = mpsc::channel();
        let thread = std::thread::Builder::new()
            .name("mpi".to_string())
            .spawn(move || {
                let ours = given.is_none();
                let made = connect(control, crowded, given).map(|(mpi, engine)| (mpi, Arc::new(engine)));
                let (mpi, engine) = match made {
                    Ok(made) => made,
                    Err(error) => return drop(started.send(Err(error))),
                };
                if started.send(Ok(engine.clone())).is_ok() {
                    let well = tend(&engine, &end);
                    finish(&engine, well, mpi, ours);
                }
            })
            .map_err(|error| Error::Unsupported(format!("a thread for MPI could not be started: {error}")))?;
        let engine = start.recv().map_err(|_| Error::Unsupported("the thread for MPI is gone".into()))??;
        Ok(Self { engine, end: Mutex::new(Some((ended, thread))) })
    }

    pub(super) fn engine(&self) -> &Arc<Engine> {
        &self.engine
    }

    /// Ends MPI; after a failure it is only let go.
    pub(super) fn end(&self, well: bool) {
        if let Some((end, thread)) = self.end.lock().take() {
            // The thread is there until it hears this; a panic of its own has been printed.
            let _ = end.send(well);
            let _ = thread.join();
        }
    }
}

/// MPI, if it is ours, and the engine over it.
fn connect(control: Arc<Control>, crowded: bool, given: Option<Communicator>) -> Result<(Option<Mpi>, Engine)> {
    let (mpi, comm) = match given {
        Some(comm) => (None, comm),
        None => {
            if Mpi::is_initialized() {
                return Err(Error::Unsupported(
                    "this program has started MPI itself; give its communicator to the engine".to_string(),
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
    let wire = Wire::new(comm, MOST_BYTES).map_err(|error| Error::Unsupported(format!("MPI: {error}")))?;
    Ok((mpi, Engine::new(control, wire, crowded)))
}

fn refused(error: ferrompi::Error) -> Error {
    Error::Unsupported(format!("MPI: {error}"))
}

/// Looks after the engine until the end, and tells whether that is a good one.
fn tend(engine: &Engine, end: &mpsc::Receiver<bool>) -> bool {
    let mut nap = SHORT;
    loop {
        nap = match engine.check().and_then(|()| engine.tend()) {
            Ok(true) => SHORT,
            Ok(false) => LONG.min(nap * 2),
            Err(_) => LONG,
        };
        match end.recv_timeout(nap) {
            Ok(well) => return well,
            Err(mpsc::RecvTimeoutError::Timeout) => {}
            Err(mpsc::RecvTimeoutError::Disconnected) => return false,
        }
    }
}

/// Ends MPI if all is well and it is ours.
fn finish(engine: &Engine, well: bool, mpi: Option<Mpi>, ours: bool) {
    let Some(wire) = engine.take_wire() else { return };
    if !well {
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
