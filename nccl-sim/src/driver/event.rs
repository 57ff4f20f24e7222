//! Events.
use super::{check, code, enter, enter_on, status, synchronize};
use crate::abi::{current_device, put};
use crate::clock::Mark;
use crate::engine::{Event, Work, lock};
use std::ffi::{c_int, c_uint};

/// `CU_EVENT_DISABLE_TIMING`.
const DISABLE_TIMING: c_uint = 2;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventCreate(to: *mut u64, flags: c_uint) -> c_int {
    status(enter("cuEventCreate").map(|(mut sim, ..)| {
        let handle = sim.handle();
        sim.events.insert(handle, Event { mark: None, is_timed: flags & DISABLE_TIMING == 0 });
        put(to, handle);
    }))
}

// "cuEventDestroy": returns at once; waits that were issued stay valid.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventDestroy_v2(event: u64) -> c_int {
    status(match lock().events.remove(&event) {
        Some(_) => Ok(()),
        None => Err(code::INVALID_HANDLE),
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventRecord(event: u64, stream: u64) -> c_int {
    status(enter_on("cuEventRecord", stream).and_then(|(mut sim, _, site, id)| {
        let is_timed = sim.events.get(&event).ok_or(code::INVALID_HANDLE)?.is_timed;
        let mark = sim.enqueue(id, site, Vec::new(), Work::Nothing);
        sim.events.insert(event, Event { mark: Some(mark), is_timed });
        sim.after_call();
        Ok(())
    }))
}

// "cuEventElapsedTime": both events must be recorded, passed, and made for it. Here it is the time of the host.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventElapsedTime_v2(to: *mut f32, start: u64, end: u64) -> c_int {
    let sim = lock();
    let time = |event| {
        let event = sim.events.get(&event).filter(|event| event.is_timed).ok_or(code::INVALID_HANDLE)?;
        event.mark.as_ref().ok_or(code::INVALID_HANDLE)?.time().ok_or(code::NOT_READY)
    };
    status(time(start).and_then(|start| {
        let end = time(end)?;
        let between = end.saturating_duration_since(start).as_secs_f32()
            - start.saturating_duration_since(end).as_secs_f32();
        put(to, between * 1e3);
        Ok(())
    }))
}

// "cuEventQuery": an event that was never recorded is complete.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventQuery(event: u64) -> c_int {
    crate::tally::count("cuEventQuery");
    let mut sim = lock();
    let Some(found) = sim.events.get(&event).cloned() else { return code::INVALID_HANDLE };
    sim.while_polling();
    if let Some(Err(error)) = current_device().map(|device| check(&sim, device)) {
        return error;
    }
    match found.mark {
        Some(mark) if !mark.is_passed() => code::NOT_READY,
        Some(mark) => {
            sim.saw(&mark);
            code::SUCCESS
        }
        None => code::SUCCESS,
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventSynchronize(event: u64) -> c_int {
    crate::tally::count("cuEventSynchronize");
    status(enter("cuEventSynchronize").and_then(|(mut sim, device, site)| {
        let found = sim.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        let marks: Vec<Mark> = found.mark.iter().cloned().collect();
        synchronize(&mut sim, &site, &marks);
        check(&sim, device)
    }))
}
