//! cuBLAS: handles, and the products that candle asks for.
use crate::abi::put;
use crate::driver::{enqueue, status};
use crate::engine::{Exec, Work, lock};
use crate::number::{Element, bytes, elements};
use half::{bf16, f16};
use std::collections::HashMap;
use std::ffi::{c_int, c_longlong, c_void};
use std::sync::{LazyLock, Mutex, MutexGuard, PoisonError};

/// The streams of the handles.
static STREAMS: LazyLock<Mutex<HashMap<u64, u64>>> = LazyLock::new(Mutex::default);

fn streams() -> MutexGuard<'static, HashMap<u64, u64>> {
    STREAMS.lock().unwrap_or_else(PoisonError::into_inner)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cublasCreate_v2(to: *mut u64) -> c_int {
    let handle = lock().handle();
    streams().insert(handle, 0);
    put(to, handle);
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cublasSetStream_v2(handle: u64, stream: u64) -> c_int {
    streams().insert(handle, stream);
    0
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cublasDestroy_v2(handle: u64) -> c_int {
    streams().remove(&handle);
    0
}

/// A batch of products C = A * B, column by column.
#[derive(Clone, Copy)]
struct Product {
    transposed: [bool; 2],
    m: usize,
    n: usize,
    k: usize,
    /// Address, leading dimension and stride between the products of A, B and C.
    places: [(u64, usize, usize); 3],
    batch: usize,
}

impl Product {
    fn run<T: Element>(&self, exec: &mut Exec<'_>) -> Option<()> {
        exec.effort.operations += 2 * self.m * self.n * self.k * self.batch;
        let [(a, lda, a_step), (b, ldb, b_step), (c, ldc, c_step)] = self.places;
        let columns = |transposed: bool, rows: usize, columns: usize| if transposed { rows } else { columns };
        let extent =
            |ld: usize, columns: usize, rows: usize| if columns == 0 { 0 } else { ld * (columns - 1) + rows };
        let [ta, tb] = self.transposed;
        let a_len = extent(lda, columns(ta, self.m, self.k), columns(!ta, self.m, self.k));
        let b_len = extent(ldb, columns(tb, self.k, self.n), columns(!tb, self.k, self.n));
        for nth in 0..self.batch {
            let address = |base: u64, step: usize| base + (nth * step * T::SIZE) as u64;
            let left = elements::<T>(&exec.read(address(a, a_step), a_len * T::SIZE)?);
            let right = elements::<T>(&exec.read(address(b, b_step), b_len * T::SIZE)?);
            let left: Vec<f64> = left.into_iter().map(|x| x.float()).collect();
            let right: Vec<f64> = right.into_iter().map(|x| x.float()).collect();
            for column in 0..self.n {
                let entry = |row: usize| {
                    let product = |at: usize| {
                        let x = if ta { left[at + row * lda] } else { left[row + at * lda] };
                        let y = if tb { right[column + at * ldb] } else { right[at + column * ldb] };
                        x * y
                    };
                    T::from_float((0..self.k).map(product).sum())
                };
                let out = bytes((0..self.m).map(entry));
                exec.write(address(c, c_step) + (column * ldc * T::SIZE) as u64, &out);
            }
        }
        Some(())
    }
}

fn product(handle: u64, name: &str, run: impl FnOnce(&mut Exec<'_>) -> Option<()> + Send + 'static) -> c_int {
    let Some(stream) = streams().get(&handle).copied() else { return 1 };
    let work = move |exec: &mut Exec<'_>| {
        let _ = run(exec);
    };
    status(enqueue(name, stream, |_| Work::Kernel(Box::new(work))).map(|_| ()))
}

/// Ends the process unless alpha is 1 and beta is 0, which is all that candle uses.
fn check_factors(alpha: f64, beta: f64) {
    if (alpha, beta) != (1.0, 0.0) {
        crate::report::die(&format!("a matrix product with factors {alpha} and {beta} is not modeled"));
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cublasGemmStridedBatchedEx(
    handle: u64,
    transposed_a: c_int,
    transposed_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const c_void,
    a: u64,
    a_type: c_int,
    lda: c_int,
    a_step: c_longlong,
    b: u64,
    b_type: c_int,
    ldb: c_int,
    b_step: c_longlong,
    beta: *const c_void,
    c: u64,
    c_type: c_int,
    ldc: c_int,
    c_step: c_longlong,
    batch: c_int,
    compute: c_int,
    _algorithm: c_int,
) -> c_int {
    const COMPUTE_16F: c_int = 64;
    let factor = |from: *const c_void| match compute {
        COMPUTE_16F => crate::abi::with(from.cast::<f16>(), |x| x.float()),
        _ => crate::abi::with(from.cast::<f32>(), |x| x.float()),
    };
    check_factors(factor(alpha).unwrap_or(1.0), factor(beta).unwrap_or(0.0));
    let product_of = Product {
        transposed: [transposed_a != 0, transposed_b != 0],
        m: m as usize,
        n: n as usize,
        k: k as usize,
        places: [
            (a, lda as usize, a_step as usize),
            (b, ldb as usize, b_step as usize),
            (c, ldc as usize, c_step as usize),
        ],
        batch: batch as usize,
    };
    // `cudaDataType`: 0 is f32, 2 is f16, 14 is bf16.
    let run: fn(&Product, &mut Exec<'_>) -> Option<()> = match (a_type, b_type, c_type) {
        (0, 0, 0) => Product::run::<f32>,
        (2, 2, 2) => Product::run::<f16>,
        (14, 14, 14) => Product::run::<bf16>,
        types => crate::report::die(&format!("a matrix product of types {types:?} is not modeled")),
    };
    product(handle, "cublasGemmStridedBatchedEx", move |exec| run(&product_of, exec))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cublasDgemmStridedBatched(
    handle: u64,
    transposed_a: c_int,
    transposed_b: c_int,
    m: c_int,
    n: c_int,
    k: c_int,
    alpha: *const f64,
    a: u64,
    lda: c_int,
    a_step: c_longlong,
    b: u64,
    ldb: c_int,
    b_step: c_longlong,
    beta: *const f64,
    c: u64,
    ldc: c_int,
    c_step: c_longlong,
    batch: c_int,
) -> c_int {
    let factor = |from: *const f64| crate::abi::with(from, |&x| x);
    check_factors(factor(alpha).unwrap_or(1.0), factor(beta).unwrap_or(0.0));
    let product_of = Product {
        transposed: [transposed_a != 0, transposed_b != 0],
        m: m as usize,
        n: n as usize,
        k: k as usize,
        places: [
            (a, lda as usize, a_step as usize),
            (b, ldb as usize, b_step as usize),
            (c, ldc as usize, c_step as usize),
        ],
        batch: batch as usize,
    };
    product(handle, "cublasDgemmStridedBatched", move |exec| product_of.run::<f64>(exec))
}
