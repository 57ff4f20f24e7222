//! Modules, functions and launches. Modules are the build's empty kernels, whose functions are found by their names, or texts
//! that NVRTC was given.
use crate::abi::{array, put};
use crate::driver::{code, enqueue, enter, status};
use crate::engine::{Work, lock, wait_for_device};
use crate::kernels::{Kernel, TextFunction};
use crate::nvrtc::text_of;
use crate::report::{Kind, fault};
use crate::settings::Loads;
use device_text::{DeviceText, LaunchShape};
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

/// The module of candle's kernels.
const CANDLE: u64 = 0x10;

/// "Compute Capabilities": shared memory that a launch may have, and the most after the function was asked for more.
const SHARED: c_uint = 48 << 10;
const MOST_SHARED: c_int = 227 << 10;

/// What a function runs.
#[derive(Clone)]
enum Code {
    Candle(Kernel),
    Text(TextFunction),
}

/// A function, with the dynamic shared memory that its launches may have.
#[derive(Clone)]
struct Function {
    code: Code,
    shared: c_uint,
}

/// The functions that were asked for, by handle, their handles by module and name, and the modules of texts.
#[derive(Default)]
struct Functions {
    known: Vec<Function>,
    handles: HashMap<(u64, String), u64>,
    texts: Vec<Arc<DeviceText>>,
}

static FUNCTIONS: LazyLock<Mutex<Functions>> = LazyLock::new(Mutex::default);

fn functions() -> std::sync::MutexGuard<'static, Functions> {
    FUNCTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Functions {
    fn of(&mut self, handle: u64) -> Option<&mut Function> {
        self.known.get_mut((handle as usize).wrapping_sub(1))
    }
}

impl Function {
    fn name(&self) -> &str {
        match &self.code {
            Code::Candle(kernel) => kernel.name(),
            Code::Text(function) => &function.name,
        }
    }

    /// The sizes of the parameters.
    fn sizes(&self) -> Vec<usize> {
        match &self.code {
            Code::Candle(kernel) => kernel.parameters().iter().map(|size| size.bytes()).collect(),
            Code::Text(function) => function.sizes(),
        }
    }
}

/// Waits for the device, as CUDA may while it loads code ("Lazy Loading", "Concurrent Execution").
fn load(call: impl Into<String>) -> Result<(), i32> {
    enter(call).map(|(mut sim, device, site)| wait_for_device(&mut sim, device, &site))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleLoadData(to: *mut u64, image: *const c_void) -> c_int {
    let module = text_of(image).map_or(CANDLE, |text| {
        let mut functions = functions();
        functions.texts.push(text);
        CANDLE + functions.texts.len() as u64
    });
    put(to, module);
    let waits = lock().rules.loads == Loads::Module;
    status(if waits { load("cuModuleLoadData") } else { Ok(()) })
}

/// Loads a kernel at its first launch on a device, if that is when code is loaded.
fn load_lazily(function: u64, name: &str) -> Result<(), i32> {
    if lock().rules.loads != Loads::Kernel {
        return Ok(());
    }
    let (mut sim, device, site) = enter(format!("the first launch of {name}"))?;
    if sim.loaded.insert((device, function)) {
        wait_for_device(&mut sim, device, &site);
    }
    Ok(())
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleUnload(_module: u64) -> c_int {
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleGetFunction(to: *mut u64, module: u64, name: *const c_char) -> c_int {
    // SAFETY: the caller passes a zero-terminated name, as the API requires.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let mut functions = functions();
    let text = module.checked_sub(CANDLE + 1).and_then(|at| functions.texts.get(at as usize).cloned());
    let key = (if text.is_some() { module } else { CANDLE }, name);
    if let Some(&handle) = functions.handles.get(&key) {
        put(to, handle);
        return code::SUCCESS;
    }
    let found = match text {
        Some(text) => TextFunction::named(text, &key.1).map(Code::Text),
        None => Kernel::named(&key.1).map(Code::Candle),
    };
    // "cuModuleGetFunction": a name that is not in the module is not found.
    let Some(found) = found else {
        eprintln!("nccl-sim: no kernel {}: its module lacks it, or the simulator does", key.1);
        return code::NOT_FOUND;
    };
    functions.known.push(Function { code: found, shared: SHARED });
    let handle = functions.known.len() as u64;
    functions.handles.insert(key, handle);
    put(to, handle);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFuncGetParamInfo(
    function: u64,
    at: usize,
    offset: *mut usize,
    size: *mut usize,
) -> c_int {
    let mut functions = functions();
    let Some(function) = functions.of(function) else { return code::INVALID_HANDLE };
    let sizes = function.sizes();
    // "cuFuncGetParamInfo": a number that is not in the list of parameters is an invalid value.
    let Some(&found) = sizes.get(at) else { return code::INVALID_VALUE };
    put(size, found);
    // A number lies at a multiple of its size; structures here are of 8 bytes.
    let aligned = |place: usize, size: usize| {
        place.next_multiple_of(if size.is_power_of_two() { size.min(8) } else { 8 })
    };
    let end = sizes[..at].iter().fold(0, |place, &size| aligned(place, size) + size);
    put(offset, aligned(end, found));
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuFuncSetAttribute(function: u64, attribute: c_int, value: c_int) -> c_int {
    const MAX_DYNAMIC_SHARED: c_int = 8;
    if attribute != MAX_DYNAMIC_SHARED {
        crate::report::die(&format!("function attribute {attribute} is not modeled"));
    }
    let mut functions = functions();
    let Some(function) = functions.of(function) else { return code::INVALID_HANDLE };
    if !(0..=MOST_SHARED).contains(&value) {
        return code::INVALID_VALUE;
    }
    function.shared = value as c_uint;
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLaunchKernel(
    handle: u64,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    shared: c_uint,
    stream: u64,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    let Some(function) = functions().of(handle).cloned() else { return code::INVALID_HANDLE };
    let name = function.name();
    // "cuLaunchKernel": all dimensions are at least 1.
    if [grid_x, grid_y, grid_z, block_x, block_y, block_z].contains(&0) {
        fault(
            Kind::Misuse,
            name,
            format!("a launch of {name} without blocks; this is an error, not a success"),
        );
        return code::INVALID_VALUE;
    }
    // "Compute Capabilities": the most threads of a block.
    if [block_x, block_y, block_z].into_iter().map(u64::from).product::<u64>() > 1024 {
        fault(
            Kind::Misuse,
            name,
            format!("a launch of {name} with {block_x} x {block_y} x {block_z} threads in a block"),
        );
        return code::INVALID_VALUE;
    }
    if shared > function.shared {
        fault(
            Kind::Misuse,
            name,
            format!(
                "a launch of {name} with {shared} bytes of shared memory, where it may have {}",
                function.shared
            ),
        );
        return code::INVALID_VALUE;
    }
    if let Err(error) = load_lazily(handle, name) {
        return error;
    }
    crate::tally::count_launch(name);
    // The values are copied before the call returns.
    let sizes = function.sizes();
    let places = array(parameters.cast_const(), sizes.len());
    let values: Vec<Vec<u8>> =
        sizes.iter().zip(places).map(|(&size, place)| array(place.cast_const().cast::<u8>(), size)).collect();
    let name = name.to_string();
    let shape = LaunchShape {
        grid: [grid_x, grid_y, grid_z],
        block: [block_x, block_y, block_z],
        shared: shared as usize,
    };
    let run = move |_| match function.code {
        Code::Candle(kernel) => {
            let values: Vec<u64> = values.iter().map(|bytes| number(bytes)).collect();
            Work::Kernel(Box::new(move |exec| kernel.run(exec, &values)))
        }
        Code::Text(function) => Work::Kernel(Box::new(move |exec| function.run(exec, shape, &values))),
    };
    status(enqueue(name, stream, run).map(|_| ()))
}

/// Returns the bits of a parameter of at most 8 bytes.
fn number(bytes: &[u8]) -> u64 {
    bytes.iter().rev().fold(0, |number, &byte| number << 8 | u64::from(byte))
}
