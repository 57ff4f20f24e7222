//! Events.
use super::{code, enter, enter_on, status, synchronize};
use crate::abi::put;
use crate::clock::Mark;
use crate::engine::{Event, Work, lock};
use std::ffi::{c_int, c_uint};

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuEventCreate(to: *mut u64, _flags: c_uint) -> c_int {
    status(enter("cuEventCreate").map(|(mut sim, ..)| {
        let handle = sim.handle();
        sim.events.insert(handle, Event::default());
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
        if !sim.events.contains_key(&event) {
            return Err(code::INVALID_HANDLE);
        }
        let mark = sim.enqueue(id, site, Vec::new(), Work::Nothing);
        sim.events.insert(event, Event { mark: Some(mark) });
        sim.after_call();
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
    status(enter("cuEventSynchronize").and_then(|(mut sim, _, site)| {
        let found = sim.events.get(&event).ok_or(code::INVALID_HANDLE)?;
        let marks: Vec<Mark> = found.mark.iter().cloned().collect();
        synchronize(&mut sim, &site, &marks);
        Ok(())
    }))
}
