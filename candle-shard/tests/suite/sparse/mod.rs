//! Tables with gradients by rows, their optimizers and their norms, against dense ones and PyTorch.
#![allow(clippy::unwrap_used)] // a panic is how a test fails

mod devices;
mod gradients;
mod optimizers;
mod pytorch;
mod renorm;

use candle_core::{DType, Device::Cpu, Tensor, Var};
use candle_shard::sparse::RowVar;
use rand_chacha::ChaCha8Rng;
use rand_core::{RngCore, SeedableRng};

const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

/// Numbers and rows that are the same in every run.
struct Random(ChaCha8Rng);

impl Random {
    fn new(seed: u64) -> Self {
        Self(ChaCha8Rng::seed_from_u64(seed))
    }

    /// Numbers between -1 and 1.
    fn tensor(&mut self, dims: &[usize], dtype: DType) -> Tensor {
        let mut number = || self.0.next_u32() as f64 / 2f64.powi(31) - 1.0;
        let values: Vec<f64> = (0..dims.iter().product()).map(|_| number()).collect();
        Tensor::from_vec(values, dims, &Cpu).unwrap().to_dtype(dtype).unwrap()
    }

    fn table(&mut self, rows: usize, width: usize, dtype: DType) -> RowVar {
        RowVar::new(Var::from_tensor(&self.tensor(&[rows, width], dtype)).unwrap()).unwrap()
    }

    /// `len` of the first `below` rows.
    fn rows(&mut self, len: usize, below: u32) -> Vec<u32> {
        (0..len).map(|_| self.0.next_u32() % below).collect()
    }
}

/// All elements; every 16-bit and f32 number is exact in f64.
fn numbers(tensor: &Tensor) -> Vec<f64> {
    tensor.to_dtype(DType::F64).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// All elements as bits, which tell zeros and NaNs apart.
fn bits(tensor: &Tensor) -> Vec<u64> {
    numbers(tensor).into_iter().map(f64::to_bits).collect()
}

#[track_caller]
fn assert_close(got: &Tensor, want: &Tensor, tolerance: f64, what: &str) {
    assert_eq!(got.dims(), want.dims(), "{what}");
    for (i, (got, want)) in numbers(got).into_iter().zip(numbers(want)).enumerate() {
        assert!(
            (got - want).abs() <= tolerance * want.abs().max(1.0),
            "{what}, element {i}: {got} for {want}"
        );
    }
}

/// The largest error of sums of some hundred numbers of about 1.
fn tolerance(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => 1e-12,
        DType::F32 => 1e-5,
        DType::F16 => 3e-2,
        _ => 2e-1,
    }
}
