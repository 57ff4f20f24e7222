//! NVRTC: texts of kernels, which the crate device-text compiles for the host. Rules: NVRTC, "Compilation".
//!
//! What stands for the compiled text is a line that has its number; a module that is loaded from it has the text's kernels.
use crate::abi::{fill, put};
use device_text::DeviceText;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_void};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError};

/// `nvrtcResult`.
const INVALID_INPUT: c_int = 3;
const INVALID_PROGRAM: c_int = 4;
const INVALID_OPTION: c_int = 5;
const COMPILATION: c_int = 6;

/// How an image begins, before the number of its text.
const MARK: &[u8] = b"// text of the simulator ";

/// The options that are known, up to their value.
const OPTIONS: [&str; 8] = [
    "--ftz=",
    "--prec-sqrt=",
    "--prec-div=",
    "--fmad=",
    "--std=",
    "--gpu-architecture=",
    "--maxrregcount=",
    "-D",
];

/// The programs that exist, and all texts that were compiled.
#[derive(Default)]
struct Programs {
    sources: HashMap<u64, TextProgram>,
    made: u64,
    texts: Vec<(String, Arc<DeviceText>)>,
}

#[derive(Default)]
struct TextProgram {
    source: String,
    log: Vec<u8>,
    image: Vec<u8>,
}

static PROGRAMS: LazyLock<Mutex<Programs>> = LazyLock::new(Mutex::default);

fn programs() -> MutexGuard<'static, Programs> {
    PROGRAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the text that an image stands for. `None` if it is one of candle's modules.
pub(crate) fn text_of(image: *const c_void) -> Option<Arc<DeviceText>> {
    let byte = |at: usize| {
        // SAFETY: the caller passes an image, whose bytes are read until one differs from those of an image of `compile`, the last of
        // which is zero.
        unsafe { image.cast::<u8>().add(at).read() }
    };
    if image.is_null() || (0..MARK.len()).any(|at| byte(at) != MARK[at]) {
        return None;
    }
    let digits = (MARK.len()..).map(byte).take_while(u8::is_ascii_digit);
    let number = digits.fold(0, |number, digit| 10 * number + usize::from(digit - b'0'));
    programs().texts.get(number).map(|(_, text)| text.clone())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcCreateProgram(
    to: *mut u64,
    source: *const c_char,
    _name: *const c_char,
    headers: c_int,
    _texts: *const *const c_char,
    _names: *const *const c_char,
) -> c_int {
    if source.is_null() || headers != 0 {
        return INVALID_INPUT;
    }
    // SAFETY: the caller passes a zero-terminated text, as the API requires.
    let source = unsafe { CStr::from_ptr(source) }.to_string_lossy().into_owned();
    let mut programs = programs();
    programs.made += 1;
    let handle = programs.made;
    programs.sources.insert(handle, TextProgram { source, ..TextProgram::default() });
    put(to, handle);
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcCompileProgram(
    program: u64,
    count: c_int,
    options: *const *const c_char,
) -> c_int {
    for option in crate::abi::array(options, usize::try_from(count).unwrap_or(0)) {
        // SAFETY: the caller passes zero-terminated options, as the API requires.
        let option = unsafe { CStr::from_ptr(option) }.to_string_lossy().into_owned();
        if !OPTIONS.iter().any(|known| option.starts_with(known)) {
            eprintln!("nccl-sim: NVRTC's option {option} is not modeled");
            return INVALID_OPTION;
        }
    }
    let mut programs = programs();
    let Some(source) = programs.sources.get(&program).map(|program| program.source.clone()) else {
        return INVALID_PROGRAM;
    };
    let known = programs.texts.iter().position(|(text, _)| *text == source);
    let number =
        match known.map_or_else(|| DeviceText::compile(&source).map(Arc::new).map(Err), |at| Ok(Ok(at))) {
            Ok(Ok(at)) => at,
            Ok(Err(text)) => {
                programs.texts.push((source, text));
                programs.texts.len() - 1
            }
            Err(log) => {
                eprintln!("nccl-sim: {log}");
                programs.sources.entry(program).or_default().log = log.into_bytes();
                return COMPILATION;
            }
        };
    let image = [MARK, number.to_string().as_bytes(), b"\0"].concat();
    programs.sources.entry(program).or_default().image = image;
    0
}

/// Gives a caller the bytes of a program, or their number, with a zero behind them.
fn give(program: u64, of: fn(&TextProgram) -> &[u8], size: *mut usize, to: *mut c_char) -> c_int {
    let programs = programs();
    let Some(bytes) = programs.sources.get(&program).map(of) else { return INVALID_PROGRAM };
    let bytes = bytes.strip_suffix(b"\0").unwrap_or(bytes);
    let bytes: Vec<c_char> = bytes.iter().chain(&[0]).map(|&byte| byte as c_char).collect();
    put(size, bytes.len());
    fill(to, &bytes);
    0
}

fn image(program: &TextProgram) -> &[u8] {
    &program.image
}

fn log(program: &TextProgram) -> &[u8] {
    &program.log
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetPTXSize(program: u64, to: *mut usize) -> c_int {
    give(program, image, to, std::ptr::null_mut())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetPTX(program: u64, to: *mut c_char) -> c_int {
    give(program, image, std::ptr::null_mut(), to)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetCUBINSize(program: u64, to: *mut usize) -> c_int {
    give(program, image, to, std::ptr::null_mut())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetCUBIN(program: u64, to: *mut c_char) -> c_int {
    give(program, image, std::ptr::null_mut(), to)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetProgramLogSize(program: u64, to: *mut usize) -> c_int {
    give(program, log, to, std::ptr::null_mut())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcGetProgramLog(program: u64, to: *mut c_char) -> c_int {
    give(program, log, std::ptr::null_mut(), to)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn nvrtcDestroyProgram(program: *mut u64) -> c_int {
    crate::abi::with(program.cast_const(), |handle| programs().sources.remove(handle));
    put(program, 0);
    0
}
