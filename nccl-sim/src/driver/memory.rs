//! Memory and copies.
use super::device::device_of;
use super::{STAGED, code, enqueue, enter, enter_on, host, status, synchronize};
use crate::abi::{array, fill, put};
use crate::engine::{Exec, Work, wait_for_marks};
use crate::report::Site;
use std::ffi::{c_int, c_void};

/// The bytes of a simulated GPU.
const TOTAL: usize = 16 << 30;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    status(enter("cuMemGetInfo").map(|(sim, device, _)| {
        put(free, TOTAL - sim.memory.used(device));
        put(total, TOTAL);
    }))
}

// "Stream Ordered Memory Allocator". The pointer is returned at once; the memory exists in stream order.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemAllocAsync(to: *mut u64, len: usize, stream: u64) -> c_int {
    status(enter_on(format!("cuMemAllocAsync of {len} bytes"), stream).map(|(mut sim, device, site, id)| {
        let address = sim.memory.reserve(device, len, id as usize);
        put(to, address);
        sim.enqueue(id, site, Vec::new(), Work::Run(Box::new(move |exec| exec.begin(address))));
        sim.after_call();
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFreeAsync(address: u64, stream: u64) -> c_int {
    status(enter_on("cuMemFreeAsync", stream).and_then(|(mut sim, _, site, id)| {
        if !sim.memory.free(address, &site, id as usize) {
            return Err(code::INVALID_VALUE);
        }
        sim.enqueue(id, site, Vec::new(), Work::Run(Box::new(move |exec| exec.end(address))));
        sim.after_call();
        Ok(())
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemsetD8Async(address: u64, value: u8, len: usize, stream: u64) -> c_int {
    crate::tally::count("cuMemsetD8Async");
    let work = |_| Work::Kernel(Box::new(move |exec| exec.write(address, &vec![value; len])));
    status(enqueue(format!("cuMemsetD8Async of {len} bytes"), stream, work).map(|_| ()))
}

// "API synchronization behavior": pageable memory is staged before the call returns, for which the driver may synchronize with
// the stream; page-locked memory is read when the copy runs.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyHtoDAsync_v2(
    to: u64,
    from: *const c_void,
    len: usize,
    stream: u64,
) -> c_int {
    crate::tally::count("cuMemcpyHtoDAsync");
    if host::is_locked(from, len) {
        let from = from.expose_provenance();
        let copy = move |exec: &mut Exec<'_>| {
            if let Some(data) = host::read(std::ptr::with_exposed_provenance(from), len) {
                exec.write(to, &data);
            }
        };
        let call = format!("cuMemcpyHtoDAsync of {len} page-locked bytes");
        let site = Site::here(call.as_str());
        let enqueued = enqueue(call, stream, |_| Work::Copy(Box::new(copy)));
        return status(enqueued.map(|mark| host::note(from, site, mark)));
    }
    let call = format!("cuMemcpyHtoDAsync of {len} bytes");
    if len > STAGED {
        match enter_on(call.as_str(), stream) {
            Ok((mut sim, _, site, id)) => {
                let tail = sim.tail(id);
                wait_for_marks(&mut sim, &site, &[tail]);
            }
            Err(error) => return error,
        }
    }
    let staged = array(from.cast::<u8>(), len);
    let work = |_| Work::Copy(Box::new(move |exec| exec.write(to, &staged)));
    status(enqueue(call, stream, work).map(|_| ()))
}

// "API synchronization behavior": a copy to pageable memory returns when it is complete.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, len: usize, stream: u64) -> c_int {
    crate::tally::count("cuMemcpyDtoHAsync");
    let (answer, copied) = std::sync::mpsc::channel();
    let call = enter_on(format!("cuMemcpyDtoHAsync of {len} bytes"), stream);
    status(call.and_then(|(mut sim, _, site, id)| {
        let read = move |exec: &mut Exec<'_>| {
            let _ = answer.send(exec.read(from, len));
        };
        sim.timeline.launches();
        let mark = sim.enqueue(id, site.clone(), Vec::new(), Work::Copy(Box::new(read)));
        synchronize(&mut sim, &site, &[mark]);
        match copied.try_recv() {
            Ok(Some(data)) => {
                fill(to.cast::<u8>(), &data);
                Ok(())
            }
            _ => Err(code::ILLEGAL_ADDRESS),
        }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) -> c_int {
    crate::tally::count("cuMemcpyDtoDAsync");
    let copy = move |exec: &mut Exec<'_>| {
        if let Some(data) = exec.read(from, len) {
            exec.write(to, &data);
        }
    };
    status(
        enqueue(format!("cuMemcpyDtoDAsync of {len} bytes"), stream, |_| Work::Copy(Box::new(copy)))
            .map(|_| ()),
    )
}

// "cuMemcpyPeerAsync": needs no peer access, and runs in the order of the stream.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyPeerAsync(
    to: u64,
    to_context: u64,
    from: u64,
    from_context: u64,
    len: usize,
    stream: u64,
) -> c_int {
    let (Some(to_device), Some(from_device)) = (device_of(to_context), device_of(from_context)) else {
        return code::INVALID_CONTEXT;
    };
    let copy = move |exec: &mut Exec<'_>| {
        exec.device = from_device;
        let data = exec.read(from, len);
        exec.device = to_device;
        if let Some(data) = data {
            exec.write(to, &data);
        }
    };
    status(
        enqueue(format!("cuMemcpyPeerAsync of {len} bytes"), stream, |_| Work::Copy(Box::new(copy)))
            .map(|_| ()),
    )
}
