//! The control messages between processes, tested with threads in place of processes.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod calls;
mod failing;
mod hostile;
mod meeting;
mod strangers;

use candle_dist::Result;
use candle_dist::control::Control;
use candle_dist::init::{InitOptions, LaunchInfo};
use std::net::TcpListener;
use std::sync::Arc;
use std::time::Duration;

/// Returns an unused address.
fn free_address() -> String {
    TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string()
}

/// The token of the tests' jobs.
const TOKEN: &str = "a token that others cannot guess";

/// Returns options of rank `rank` of `size`, with timeouts that are too long to end a test.
fn options(address: &str, rank: usize, size: usize) -> InitOptions {
    let options = InitOptions::explicit(address, rank, size).token(TOKEN);
    options.timeout(Duration::from_secs(60)).init_timeout(Duration::from_secs(30))
}

fn connect(options: &InitOptions) -> Result<Arc<Control>> {
    Control::connect(&LaunchInfo::from_env(options).unwrap(), options)
}

/// Runs `f` on every rank of a world of `size`, with options changed by `change`, and returns the results.
fn world_with<T: Send>(
    size: usize,
    change: impl Fn(InitOptions) -> InitOptions + Sync,
    f: impl Fn(Arc<Control>) -> T + Sync,
) -> Vec<T> {
    let address = free_address();
    let (address, change, f) = (&address, &change, &f);
    let run = move |rank| f(connect(&change(options(address, rank, size))).unwrap());
    std::thread::scope(|scope| {
        let threads: Vec<_> = (0..size).map(|rank| scope.spawn(move || run(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

fn world<T: Send>(size: usize, f: impl Fn(Arc<Control>) -> T + Sync) -> Vec<T> {
    world_with(size, |options| options, f)
}

/// Waits until the world has failed, and returns the error text.
fn heard(control: &Control) -> String {
    loop {
        match control.failure() {
            Some(failure) => return failure.to_string(),
            None => std::thread::sleep(Duration::from_millis(1)),
        }
    }
}

/// Asserts that all ranks got the same text, and returns it.
fn common(heard: &[String]) -> String {
    assert!(heard.iter().all(|text| text == &heard[0]), "{heard:#?}");
    heard[0].clone()
}
