//! Numbers for tests.
use candle_core::{DType, Device::Cpu, Tensor, Var};

/// Numbers between -1 and 1 that look random and are the same in each run.
#[allow(clippy::unwrap_used)] // a panic is how a test fails
pub(crate) fn waves(dims: &[usize], dtype: DType) -> Var {
    let x = Tensor::arange(0f64, dims.iter().product::<usize>() as f64, &Cpu).unwrap();
    let x = x.affine(0.7, 0.2).unwrap().sin().unwrap().reshape(dims).unwrap();
    Var::from_tensor(&x.to_dtype(dtype).unwrap()).unwrap()
}
