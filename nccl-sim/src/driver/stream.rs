//! Streams and host functions.
use super::{check, code, enqueue, enter, enter_on, status, synchronize};
use crate::abi::put;
use crate::engine::{HostCall, StreamKind, Work};
use std::ffi::{c_int, c_uint, c_void};

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamCreate(to: *mut u64, flags: c_uint) -> c_int {
    cuStreamCreateWithPriority(to, flags, LEAST)
}

/// The priorities of streams; the lower number goes first.
const LEAST: c_int = 0;
const GREATEST: c_int = -5;

// "cuStreamCreateWithPriority": a priority outside of the range is moved into it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamCreateWithPriority(to: *mut u64, flags: c_uint, priority: c_int) -> c_int {
    let kind = if flags == 0 { StreamKind::Blocking } else { StreamKind::NonBlocking };
    let priority = priority.clamp(GREATEST, LEAST);
    status(enter("cuStreamCreate").map(|(mut sim, device, _)| put(to, sim.create(device, kind, priority))))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_int {
    status(enter("cuCtxGetStreamPriorityRange").map(|_| {
        put(least, LEAST);
        put(greatest, GREATEST);
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamGetPriority(stream: u64, to: *mut c_int) -> c_int {
    status(enter_on("cuStreamGetPriority", stream).map(|(mut sim, _, _, id)| {
        put(to, sim.stream(id).map_or(LEAST, |stream| stream.priority));
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamDestroy_v2(stream: u64) -> c_int {
    status(enter("cuStreamDestroy").map(|(mut sim, ..)| sim.destroy(stream)))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamSynchronize(stream: u64) -> c_int {
    crate::tally::count("cuStreamSynchronize");
    status(enter_on("cuStreamSynchronize", stream).and_then(|(mut sim, device, site, id)| {
        let tail = sim.tail(id);
        synchronize(&mut sim, &site, &[tail]);
        check(&sim, device)
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamWaitEvent(stream: u64, event: u64, _flags: c_uint) -> c_int {
    status(enter_on("cuStreamWaitEvent", stream).and_then(|(mut sim, _, site, id)| {
        let event = sim.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        // "cuStreamWaitEvent": the latest record at the time of the call; none, if the event was never recorded.
        if let Some(mark) = event.mark.clone() {
            sim.enqueue(id, site, vec![mark], Work::Nothing);
            sim.after_call();
        }
        Ok(())
    }))
}

// "Stream Management": 0 means that the stream does not capture. Captures are not modeled.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamIsCapturing(_stream: u64, to: *mut c_int) -> c_int {
    put(to, 0);
    code::SUCCESS
}

// "cuLaunchHostFunc": runs after the work before it, and the work after it waits.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLaunchHostFunc(
    stream: u64,
    function: extern "C" fn(*mut c_void),
    argument: *mut c_void,
) -> c_int {
    let argument = argument as usize;
    status(enqueue("cuLaunchHostFunc", stream, |_| Work::Host(HostCall(function, argument))).map(|_| ()))
}
