//! The model that an adapter is trained on, told from others.

use std::ops::Range;

use anyhow::Result;
use candle_core::{DType, Device};

use super::corpus::Stamp;
use crate::files::Files;

/// The numbers of each row that are looked at: enough to tell trained models apart, and little to read.
const NUMBERS: usize = 32;

/// What tells a model from others with the same sizes: a few numbers of each tensor.
///
/// # Errors
/// If a tensor cannot be read.
pub fn stamp(files: &Files) -> Result<Stamp> {
    let tensors = files.config.tensors();
    let mut bytes = Vec::new();
    for (name, shape) in &tensors {
        bytes.extend(name.bytes());
        shape.iter().for_each(|&size| bytes.extend((size as u64).to_le_bytes()));
        let last = shape.len().saturating_sub(1);
        let block: Vec<Range<usize>> = shape
            .iter()
            .enumerate()
            .map(|(dim, &size)| 0..size.min(if dim == last { NUMBERS } else { 1 }))
            .collect();
        let some = files.weights().read_block(name, &block, &Device::Cpu)?;
        let some = some.to_dtype(DType::F32)?.flatten_all()?.to_vec1::<f32>()?;
        bytes.extend(some.into_iter().flat_map(|number| number.to_bits().to_le_bytes()));
    }
    Ok(Stamp::of(tensors.len(), bytes))
}
