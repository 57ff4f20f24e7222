//! Attacks on the programs: templates, files and servers of strangers, and jobs that share folders.

mod files;
mod hub;
mod messages;
mod steps;
mod templates;

use std::sync::mpsc;
use std::thread;
use std::time::Duration;

/// Runs `f`, which has to end by itself within a time that is generous for all machines.
pub(crate) fn ends<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(f()));
    told.recv_timeout(Duration::from_secs(100)).map_err(|error| format!("hangs or panics ({error})"))
}
