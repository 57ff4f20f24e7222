//! Attacks on the programs: templates, files and servers of strangers, and jobs that share folders.

mod disks;
mod files;
mod hub;
mod messages;
mod steps;
mod templates;
#[cfg(unix)]
mod terminals;

use std::process::{Command, Output, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

/// What a program says, which has to end by itself.
fn output(command: &mut Command) -> Result<Output, String> {
    let began = Instant::now();
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = child.map_err(|error| error.to_string())?;
    while child.try_wait().map_err(|error| error.to_string())?.is_none() {
        if began.elapsed() > Duration::from_secs(60) {
            child.kill().ok();
            child.wait().ok();
            return Err("hangs".into());
        }
        std::thread::sleep(Duration::from_millis(20));
    }
    child.wait_with_output().map_err(|error| error.to_string())
}

/// Runs `f`, which has to end by itself within a time that is generous for all machines.
pub(crate) fn ends<T: Send + 'static>(f: impl FnOnce() -> T + Send + 'static) -> Result<T, String> {
    let (tell, told) = mpsc::channel();
    thread::spawn(move || tell.send(f()));
    told.recv_timeout(Duration::from_secs(100)).map_err(|error| format!("hangs or panics ({error})"))
}
