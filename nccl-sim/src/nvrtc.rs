//! NVRTC: programs that are accepted as they are, since the driver finds kernels by their names. Rules: NVRTC, "Compilation".
use crate::abi::{fill, put};
use std::ffi::{c_char, c_int};
use std::sync::atomic::{AtomicU64, Ordering};

/// What stands for the compiled text of every program.
const COMPILED: &[u8] = b"// simulated\0";

/// `NVRTC_ERROR_INVALID_INPUT`: a program without a text.
const INVALID_INPUT: c_int = 3;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcCreateProgram(
    to: *mut u64,
    source: *const c_char,
    _name: *const c_char,
    _headers: c_int,
    _texts: *const *const c_char,
    _names: *const *const c_char,
) -> c_int {
    static PROGRAMS: AtomicU64 = AtomicU64::new(1);
    if source.is_null() {
        return INVALID_INPUT;
    }
    put(to, PROGRAMS.fetch_add(1, Ordering::Relaxed));
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcCompileProgram(
    _program: u64,
    _count: c_int,
    _options: *const *const c_char,
) -> c_int {
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetPTXSize(_program: u64, to: *mut usize) -> c_int {
    put(to, COMPILED.len());
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetPTX(_program: u64, to: *mut c_char) -> c_int {
    let text: Vec<c_char> = COMPILED.iter().map(|&byte| byte as c_char).collect();
    fill(to, &text);
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcDestroyProgram(program: *mut u64) -> c_int {
    put(program, 0);
    0
}
