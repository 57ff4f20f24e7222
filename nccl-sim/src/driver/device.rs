//! Devices, contexts and errors.
use super::{check, code, enter, status, synchronize};
use crate::abi::{current_device, fill, put, set_current_device};
use crate::engine::lock;
use crate::settings;
use std::ffi::{c_char, c_int, c_uint};

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuInit(_flags: c_uint) -> c_int {
    settings::connections(); // from here on, the variable changes nothing
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

pub(super) fn device(ordinal: c_int) -> Result<usize, i32> {
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
        1 => 1024,                        // threads per block
        8 => 48 << 10,                    // shared memory per block
        10 => 32,                         // warp
        16 => lock().rules.ctas as c_int, // multiprocessors
        97 => 227 << 10,                  // shared memory per block, on request
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

pub(super) fn device_of(context: u64) -> Option<usize> {
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
    crate::tally::count("cuCtxSynchronize");
    status(enter("cuCtxSynchronize").and_then(|(mut sim, device, site)| {
        let tails = sim.tails(device);
        synchronize(&mut sim, &site, &tails);
        check(&sim, device)
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
        code::ILLEGAL_ADDRESS => c"an illegal memory access was encountered",
        code::NOT_PERMITTED => c"operation not permitted",
        _ => c"an error of the simulated driver",
    };
    put(to, text.as_ptr());
    code::SUCCESS
}
