//! Batches cut into microbatches and joined again.
#![allow(clippy::unwrap_used)] // a panic is how a test fails
mod errors;
mod gradients;
mod logged;
mod masked;
mod merging;
mod random;
mod splitting;

use candle_core::{DType, Device, Tensor};
use candle_pipe::microbatch::{ChunkSpec, KwargsSpec};
use candle_pipe::{Kwargs, Value};

/// Numbers from 0 in any shape.
fn counting(shape: &[usize]) -> Tensor {
    let n = shape.iter().product::<usize>() as u32;
    Tensor::arange(0, n, &Device::Cpu).unwrap().to_dtype(DType::F64).unwrap().reshape(shape).unwrap()
}

/// A tensor of a shape, as a value.
fn of(shape: &[usize]) -> Value {
    counting(shape).into()
}

fn kwargs<const N: usize>(entries: [(&str, Value); N]) -> Kwargs {
    entries.into_iter().map(|(key, value)| (key.to_owned(), value)).collect()
}

fn specs<const N: usize>(entries: [(&str, ChunkSpec); N]) -> KwargsSpec {
    entries.into_iter().map(|(key, spec)| (key.to_owned(), spec)).collect()
}

/// Values and specs as they are listed, one after the other.
fn listing<T: ToString>(items: impl IntoIterator<Item = T>) -> Vec<String> {
    items.into_iter().map(|item| item.to_string()).collect()
}

fn list(value: &Value) -> Vec<f64> {
    value.tensor().unwrap().flatten_all().unwrap().to_vec1().unwrap()
}
