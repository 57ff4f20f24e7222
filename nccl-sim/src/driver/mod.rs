//! The CUDA driver. Rules: CUDA Driver API, by the module named.
mod device;
mod event;
mod host;
mod memory;
mod pool;
mod stream;

#[cfg(test)]
pub(crate) use {device::*, event::*, host::*, memory::*, pool::*, stream::*};

use crate::abi::{current_device, thread};
use crate::clock::Mark;
use crate::engine::{Sim, Work, in_host_function, lock, wait};
use crate::report::{Kind, Site, fault};
use parking_lot::MutexGuard;
use std::ffi::c_int;
use std::sync::Arc;

/// `CUresult`.
pub(crate) mod code {
    pub(crate) const SUCCESS: i32 = 0;
    pub(crate) const INVALID_VALUE: i32 = 1;
    pub(crate) const INVALID_DEVICE: i32 = 101;
    pub(crate) const INVALID_CONTEXT: i32 = 201;
    pub(crate) const INVALID_HANDLE: i32 = 400;
    pub(crate) const NOT_FOUND: i32 = 500;
    pub(crate) const NOT_READY: i32 = 600;
    pub(crate) const ILLEGAL_ADDRESS: i32 = 700;
    pub(crate) const NOT_PERMITTED: i32 = 800;
}

type Locked = MutexGuard<'static, Sim>;

/// Begins a call: returns the machine, the calling thread's device, and the call's name.
pub(crate) fn enter(call: impl Into<String>) -> Result<(Locked, usize, Arc<Site>), i32> {
    let call = call.into();
    if in_host_function() {
        // "cuLaunchHostFunc": the function must not make any CUDA API call.
        fault(Kind::Misuse, call.as_str(), format!("{call} is called by a host function"));
        return Err(code::NOT_PERMITTED);
    }
    // "Context Management": a call without a current context is an error.
    let device = current_device().ok_or(code::INVALID_CONTEXT)?;
    let sim = lock();
    check(&sim, device)?;
    Ok((sim, device, Site::here(call)))
}

/// "CUDA_ERROR_ILLEGAL_ADDRESS": all further work of the context returns the same error.
fn check(sim: &Sim, device: usize) -> Result<(), i32> {
    if sim.memory.is_broken(device) { Err(code::ILLEGAL_ADDRESS) } else { Ok(()) }
}

/// As [`enter`], and returns the stream of a handle.
fn enter_on(call: impl Into<String>, stream: u64) -> Result<(Locked, usize, Arc<Site>, u64), i32> {
    let (mut sim, device, site) = enter(call)?;
    let Some(id) = sim.resolve(stream, device, thread()) else {
        fault(Kind::Misuse, site.call(), format!("{site} on a stream that does not exist"));
        return Err(code::INVALID_HANDLE);
    };
    // Work goes to the device of the stream.
    let device = sim.stream(id).map_or(device, |stream| stream.device);
    check(&sim, device)?;
    Ok((sim, device, site, id))
}

/// Ends a call that returns nothing but its status.
pub(crate) fn status(result: Result<(), i32>) -> c_int {
    result.err().unwrap_or(code::SUCCESS)
}

/// Puts work on the stream of a handle.
pub(crate) fn enqueue(
    call: impl Into<String>,
    stream: u64,
    work: impl FnOnce(usize) -> Work,
) -> Result<Mark, i32> {
    let (mut sim, device, site, id) = enter_on(call, stream)?;
    sim.timeline.launches();
    let mark = sim.enqueue(id, site, Vec::new(), work(device));
    sim.after_call();
    check(&sim, device)?;
    Ok(mark)
}

/// Waits until the points are passed. Afterwards the host has seen them.
fn synchronize(sim: &mut Locked, site: &Arc<Site>, marks: &[Mark]) {
    wait(sim, site, |_| marks.iter().all(Mark::is_passed));
    marks.iter().for_each(|mark| sim.saw(mark));
}

/// The largest copy from pageable memory that never waits for its stream ("API synchronization behavior").
const STAGED: usize = 64 << 10;
