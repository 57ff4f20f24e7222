//! cuRAND: generators, and the numbers that candle asks for. They are other numbers than those of the real library.
use crate::abi::put;
use crate::driver::{enqueue, status};
use crate::engine::{Random, Work, lock};
use crate::number::{Element, bytes};
use std::collections::HashMap;
use std::ffi::c_int;
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// A generator: its stream, and the numbers to come.
struct Generator {
    stream: u64,
    numbers: Random,
}

static GENERATORS: LazyLock<Mutex<HashMap<u64, Generator>>> = LazyLock::new(Mutex::default);

fn generators() -> MutexGuard<'static, HashMap<u64, Generator>> {
    GENERATORS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// `CURAND_STATUS_NOT_INITIALIZED` and `CURAND_STATUS_LENGTH_NOT_MULTIPLE`.
const NOT_INITIALIZED: c_int = 101;
const LENGTH_NOT_MULTIPLE: c_int = 105;

#[unsafe(no_mangle)]
pub(crate) extern "C" fn curandCreateGenerator(to: *mut u64, _kind: c_int) -> c_int {
    let handle = lock().handle();
    generators().insert(handle, Generator { stream: 0, numbers: Random::new(0) });
    put(to, handle);
    0
}

/// Changes a generator.
fn change(handle: u64, change: impl FnOnce(&mut Generator)) -> c_int {
    generators().get_mut(&handle).map_or(NOT_INITIALIZED, |generator| {
        change(generator);
        0
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn curandSetStream(handle: u64, stream: u64) -> c_int {
    change(handle, |generator| generator.stream = stream)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn curandSetPseudoRandomGeneratorSeed(handle: u64, seed: u64) -> c_int {
    change(handle, |generator| generator.numbers = Random::new(seed))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn curandDestroyGenerator(handle: u64) -> c_int {
    generators().remove(&handle).map_or(NOT_INITIALIZED, |_| 0)
}

/// Puts numbers that a function makes of two even ones in (0, 1] into memory, in the order of the generator's stream.
fn generate<T: Element + Send + 'static>(
    handle: u64,
    name: &str,
    to: u64,
    count: usize,
    make: impl Fn([f64; 2]) -> f64,
) -> c_int {
    const STEPS: u64 = 1 << 53;
    let (stream, numbers) = {
        let mut generators = generators();
        let Some(Generator { stream, numbers }) = generators.get_mut(&handle) else { return NOT_INITIALIZED };
        let mut even = || (numbers.below(STEPS) + 1) as f64 / STEPS as f64;
        (*stream, bytes((0..count).map(|_| T::from_float(make([even(), even()])))))
    };
    status(
        enqueue(name, stream, |_| Work::Kernel(Box::new(move |exec| exec.write(to, &numbers)))).map(|_| ()),
    )
}

/// As [`generate`], for normal numbers. "Host API Overview": they come in pairs, so their count is even.
fn normal<T: Element + Send + 'static>(
    handle: u64,
    name: &str,
    to: u64,
    count: usize,
    mean: f64,
    deviation: f64,
) -> c_int {
    if !count.is_multiple_of(2) {
        return LENGTH_NOT_MULTIPLE;
    }
    let box_muller = |[a, b]: [f64; 2]| (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
    generate::<T>(handle, name, to, count, |pair| mean + deviation * box_muller(pair))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn curandGenerateUniform(handle: u64, to: u64, count: usize) -> c_int {
    generate::<f32>(handle, "curandGenerateUniform", to, count, |[even, _]| even)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn curandGenerateUniformDouble(handle: u64, to: u64, count: usize) -> c_int {
    generate::<f64>(handle, "curandGenerateUniformDouble", to, count, |[even, _]| even)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn curandGenerateNormal(
    handle: u64,
    to: u64,
    count: usize,
    mean: f32,
    deviation: f32,
) -> c_int {
    normal::<f32>(handle, "curandGenerateNormal", to, count, f64::from(mean), f64::from(deviation))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn curandGenerateNormalDouble(
    handle: u64,
    to: u64,
    count: usize,
    mean: f64,
    deviation: f64,
) -> c_int {
    normal::<f64>(handle, "curandGenerateNormalDouble", to, count, mean, deviation)
}
