//! Modules, functions and launches. Modules are the build's empty kernels; a function is found by its name.
use crate::abi::{array, put};
use crate::driver::{code, enqueue, enter, status};
use crate::engine::{Work, lock, wait_for_device};
use crate::kernels::{Kernel, Size};
use crate::report::{Kind, fault};
use crate::settings::Loads;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::sync::{LazyLock, Mutex, PoisonError};

/// The kernels that were asked for, by handle, and their handles by name.
#[derive(Default)]
struct Functions {
    kernels: Vec<Kernel>,
    handles: HashMap<String, u64>,
}

static FUNCTIONS: LazyLock<Mutex<Functions>> = LazyLock::new(Mutex::default);

fn functions() -> std::sync::MutexGuard<'static, Functions> {
    FUNCTIONS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for the device, as CUDA may while it loads code ("Lazy Loading", "Concurrent Execution").
fn load(call: impl Into<String>) -> Result<(), i32> {
    enter(call).map(|(mut sim, device, site)| wait_for_device(&mut sim, device, &site))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuModuleLoadData(to: *mut u64, _image: *const c_void) -> c_int {
    put(to, 0x10);
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
pub(crate) extern "C" fn cuModuleGetFunction(to: *mut u64, _module: u64, name: *const c_char) -> c_int {
    // SAFETY: the caller passes a zero-terminated name, as the API requires.
    let name = unsafe { CStr::from_ptr(name) }.to_string_lossy().into_owned();
    let mut functions = functions();
    let handle = match functions.handles.get(&name) {
        Some(&handle) => handle,
        None => {
            // "cuModuleGetFunction": a name that is not in the module is not found.
            let Some(kernel) = Kernel::named(&name) else {
                eprintln!("nccl-sim: no kernel {name}: candle-kernels lacks it, or the simulator does");
                return code::NOT_FOUND;
            };
            functions.kernels.push(kernel);
            let handle = functions.kernels.len() as u64;
            functions.handles.insert(name, handle);
            handle
        }
    };
    put(to, handle);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuLaunchKernel(
    function: u64,
    grid_x: c_uint,
    grid_y: c_uint,
    grid_z: c_uint,
    block_x: c_uint,
    block_y: c_uint,
    block_z: c_uint,
    _shared: c_uint,
    stream: u64,
    parameters: *mut *mut c_void,
    _extra: *mut *mut c_void,
) -> c_int {
    let kernel = functions().kernels.get((function as usize).wrapping_sub(1)).cloned();
    let Some(kernel) = kernel else { return code::INVALID_HANDLE };
    let name = kernel.name();
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
    if let Err(error) = load_lazily(function, name) {
        return error;
    }
    // The values are copied before the call returns.
    let places = array(parameters.cast_const(), kernel.parameters().len());
    let values: Vec<u64> =
        kernel.parameters().iter().zip(places).map(|(&size, place)| value(size, place)).collect();
    let name = kernel.name().to_string();
    status(
        enqueue(name, stream, move |_| Work::Kernel(Box::new(move |exec| kernel.run(exec, &values))))
            .map(|_| ()),
    )
}

/// Returns the bits of a parameter.
fn value(size: Size, place: *mut c_void) -> u64 {
    let place = place.cast_const();
    match size {
        Size::One => crate::abi::with(place.cast::<u8>(), |&value| u64::from(value)),
        Size::Two => crate::abi::with(place.cast::<u16>(), |&value| u64::from(value)),
        Size::Four => crate::abi::with(place.cast::<u32>(), |&value| u64::from(value)),
        Size::Eight => crate::abi::with(place.cast::<u64>(), |&value| value),
    }
    .unwrap_or(0)
}
