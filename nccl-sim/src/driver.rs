//! The CUDA driver: devices, contexts, memory, streams and events. Rules: CUDA Driver API, by the module named.
use crate::abi::{array, current_device, fill, put, set_current_device};
use crate::clock::Mark;
use crate::engine::{Event, HostCall, Sim, StreamKind, Work, in_host_function, lock, wait};
use crate::report::{Kind, Site, fault};
use crate::settings;
use parking_lot::MutexGuard;
use std::ffi::{c_char, c_int, c_uint, c_void};
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
    pub(crate) const NOT_PERMITTED: i32 = 800;
}

type Locked = MutexGuard<'static, Sim>;

/// The bytes of a simulated GPU.
const TOTAL: usize = 16 << 30;

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
    Ok((lock(), device, Site::here(call)))
}

/// As [`enter`], and returns the stream of a handle.
fn enter_on(call: impl Into<String>, stream: u64) -> Result<(Locked, usize, Arc<Site>, u64), i32> {
    let (mut sim, device, site) = enter(call)?;
    let Some(id) = sim.resolve(stream, device, std::thread::current().id()) else {
        fault(Kind::Misuse, site.call(), format!("{site} on a stream that does not exist"));
        return Err(code::INVALID_HANDLE);
    };
    // Work goes to the device of the stream.
    let device = sim.stream(id).map_or(device, |stream| stream.device);
    Ok((sim, device, site, id))
}

/// Ends a call that returns nothing but its status.
pub(crate) fn status(result: Result<(), i32>) -> c_int {
    result.err().unwrap_or(code::SUCCESS)
}

/// Puts work on the stream of a handle.
pub(crate) fn enqueue(call: impl Into<String>, stream: u64, work: impl FnOnce(usize) -> Work) -> Result<Mark, i32> {
    let (mut sim, device, site, id) = enter_on(call, stream)?;
    let mark = sim.enqueue(id, site, Vec::new(), work(device));
    sim.after_call();
    Ok(mark)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuInit(_flags: c_uint) -> c_int {
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDriverGetVersion(version: *mut c_int) -> c_int {
    put(version, 13000);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetCount(count: *mut c_int) -> c_int {
    put(count, settings::get().gpus as c_int);
    code::SUCCESS
}

fn device(ordinal: c_int) -> Result<usize, i32> {
    let found = usize::try_from(ordinal).ok().filter(|&device| device < settings::get().gpus);
    found.ok_or(code::INVALID_DEVICE)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGet(to: *mut c_int, ordinal: c_int) -> c_int {
    status(device(ordinal).map(|device| put(to, device as c_int)))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetAttribute(to: *mut c_int, attribute: c_int, ordinal: c_int) -> c_int {
    const COMPUTE_MAJOR: c_int = 75;
    const COMPUTE_MINOR: c_int = 76;
    const MEMORY_POOLS: c_int = 115;
    let value = match attribute {
        COMPUTE_MAJOR => 9,
        COMPUTE_MINOR => 0,
        MEMORY_POOLS => 1,
        1 => 1024,       // threads per block
        8 => 48 << 10,   // shared memory per block
        10 => 32,        // warp
        16 => 132,       // multiprocessors
        97 => 227 << 10, // shared memory per block, on request
        _ => crate::report::die(&format!("device attribute {attribute} is not modeled")),
    };
    status(device(ordinal).map(|_| put(to, value)))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetName(to: *mut c_char, len: c_int, ordinal: c_int) -> c_int {
    let name: Vec<c_char> = b"simulated GPU\0".iter().map(|&byte| byte as c_char).collect();
    let len = usize::try_from(len).unwrap_or(0).min(name.len());
    status(device(ordinal).map(|_| fill(to, &name[..len])))
}

/// Returns the handle of a device's primary context.
fn context(device: usize) -> u64 {
    (device as u64 + 1) << 8
}

fn device_of(context: u64) -> Option<usize> {
    let device = (context >> 8).checked_sub(1)? as usize;
    (device < settings::get().gpus).then_some(device)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRetain(to: *mut u64, ordinal: c_int) -> c_int {
    status(device(ordinal).map(|device| put(to, context(device))))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDevicePrimaryCtxRelease_v2(ordinal: c_int) -> c_int {
    status(device(ordinal).map(|_| ()))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxGetCurrent(to: *mut u64) -> c_int {
    put(to, current_device().map_or(0, context));
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSetCurrent(context: u64) -> c_int {
    let device = device_of(context);
    if context != 0 && device.is_none() {
        return code::INVALID_CONTEXT;
    }
    set_current_device(device);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxSynchronize() -> c_int {
    status(enter("cuCtxSynchronize").map(|(mut sim, device, site)| {
        let tails = sim.tails(device);
        synchronize(&mut sim, &site, &tails);
    }))
}

/// Waits until the points are passed. Afterwards the host has seen them.
fn synchronize(sim: &mut Locked, site: &Arc<Site>, marks: &[Mark]) {
    wait(sim, site, |_| marks.iter().all(Mark::is_passed));
    marks.iter().for_each(|mark| sim.saw(mark));
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemGetInfo_v2(free: *mut usize, total: *mut usize) -> c_int {
    status(enter("cuMemGetInfo").map(|(sim, device, _)| {
        put(free, TOTAL - sim.memory.used(device));
        put(total, TOTAL);
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorName(_error: c_int, to: *mut *const c_char) -> c_int {
    put(to, c"CUDA_ERROR_SIMULATED".as_ptr());
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuGetErrorString(error: c_int, to: *mut *const c_char) -> c_int {
    let text = match error {
        code::INVALID_VALUE => c"invalid argument",
        code::INVALID_DEVICE => c"invalid device ordinal",
        code::INVALID_CONTEXT => c"invalid device context",
        code::INVALID_HANDLE => c"invalid resource handle",
        code::NOT_FOUND => c"named symbol not found",
        code::NOT_READY => c"device not ready",
        code::NOT_PERMITTED => c"operation not permitted",
        _ => c"an error of the simulated driver",
    };
    put(to, text.as_ptr());
    code::SUCCESS
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
    let work = |_| Work::Run(Box::new(move |exec| exec.write(address, &vec![value; len])));
    status(enqueue(format!("cuMemsetD8Async of {len} bytes"), stream, work).map(|_| ()))
}

// "API synchronization behavior": pageable memory is staged before the call returns.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyHtoDAsync_v2(to: u64, from: *const c_void, len: usize, stream: u64) -> c_int {
    let staged = array(from.cast::<u8>(), len);
    let work = |_| Work::Run(Box::new(move |exec| exec.write(to, &staged)));
    status(enqueue(format!("cuMemcpyHtoDAsync of {len} bytes"), stream, work).map(|_| ()))
}

// "API synchronization behavior": a copy to pageable memory returns when it is complete.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoHAsync_v2(to: *mut c_void, from: u64, len: usize, stream: u64) -> c_int {
    let (answer, copied) = std::sync::mpsc::channel();
    let call = enter_on(format!("cuMemcpyDtoHAsync of {len} bytes"), stream);
    status(call.and_then(|(mut sim, _, site, id)| {
        let read = move |exec: &mut crate::engine::Exec<'_>| {
            let _ = answer.send(exec.read(from, len));
        };
        let mark = sim.enqueue(id, site.clone(), Vec::new(), Work::Run(Box::new(read)));
        synchronize(&mut sim, &site, &[mark]);
        match copied.try_recv() {
            Ok(Some(data)) => {
                fill(to.cast::<u8>(), &data);
                Ok(())
            }
            _ => Err(code::INVALID_VALUE),
        }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemcpyDtoDAsync_v2(to: u64, from: u64, len: usize, stream: u64) -> c_int {
    let copy = move |exec: &mut crate::engine::Exec<'_>| {
        if let Some(data) = exec.read(from, len) {
            exec.write(to, &data);
        }
    };
    status(enqueue(format!("cuMemcpyDtoDAsync of {len} bytes"), stream, |_| Work::Run(Box::new(copy))).map(|_| ()))
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
    let copy = move |exec: &mut crate::engine::Exec<'_>| {
        exec.device = from_device;
        let data = exec.read(from, len);
        exec.device = to_device;
        if let Some(data) = data {
            exec.write(to, &data);
        }
    };
    status(enqueue(format!("cuMemcpyPeerAsync of {len} bytes"), stream, |_| Work::Run(Box::new(copy))).map(|_| ()))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamCreate(to: *mut u64, flags: c_uint) -> c_int {
    let kind = if flags == 0 { StreamKind::Blocking } else { StreamKind::NonBlocking };
    status(enter("cuStreamCreate").map(|(mut sim, device, _)| put(to, sim.create(device, kind))))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamCreateWithPriority(to: *mut u64, flags: c_uint, _priority: c_int) -> c_int {
    cuStreamCreate(to, flags)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamDestroy_v2(stream: u64) -> c_int {
    status(enter("cuStreamDestroy").map(|(mut sim, ..)| sim.destroy(stream)))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuStreamSynchronize(stream: u64) -> c_int {
    status(enter_on("cuStreamSynchronize", stream).map(|(mut sim, _, site, id)| {
        let tail = sim.tail(id);
        synchronize(&mut sim, &site, &[tail]);
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
