//! A safetensors file, written tensor by tensor.
use super::dtypes;
use crate::files::disk;
use crate::{Error, Result};
use bytemuck::Pod;
use candle_core::{DType, Tensor, WithDType};
use half::{bf16, f16};
use serde_json::{Map, json};
use std::cmp::Reverse;
use std::fs::File;
use std::io;
use std::path::{Path, PathBuf};

/// A file whose header is written, and whose tensors follow.
pub(crate) struct WeightWriter {
    path: PathBuf,
    file: File,
}

/// A tensor in the header: name, dtype and shape.
pub(crate) type Announced<'a> = (&'a str, DType, &'a [usize]);

impl WeightWriter {
    /// The order of the tensors in the file: large element sizes first, so that all are aligned.
    pub(crate) fn order(dtype: DType, name: &str) -> (Reverse<usize>, &str) {
        (Reverse(dtype.size_in_bytes()), name)
    }

    /// Creates the file and writes the header for these tensors.
    pub(crate) fn create<'a>(path: &Path, tensors: impl Iterator<Item = Announced<'a>>) -> Result<Self> {
        // Python's loaders read the framework from the header and refuse other values.
        let metadata = ("__metadata__".to_owned(), json!({ "format": "pt" }));
        let (mut header, mut end) = (Map::from_iter([metadata]), 0);
        for (name, dtype, shape) in tensors {
            let named = dtypes::name_of(dtype).ok_or_else(|| {
                Error::file(path, format!("{name:?} holds {}, which cannot be saved; cast it", dtype.as_str()))
            })?;
            let start = end;
            end += shape.iter().product::<usize>() * dtype.size_in_bytes();
            header.insert(name.into(), json!({ "dtype": named, "shape": shape, "data_offsets": [start, end] }));
        }
        let mut header = serde_json::Value::Object(header).to_string().into_bytes();
        header.resize(header.len().next_multiple_of(8), b' ');
        let file = disk::create(path).map_err(|error| failed(path, &error))?;
        let mut writer = Self { path: path.into(), file };
        writer.put(&(header.len() as u64).to_le_bytes())?;
        writer.put(&header)?;
        Ok(writer)
    }

    /// Writes the next tensor of the header.
    pub(crate) fn write(&mut self, tensor: &Tensor) -> Result<()> {
        match tensor.dtype() {
            DType::U8 => self.typed::<u8>(tensor),
            DType::U32 => self.typed::<u32>(tensor),
            DType::I16 => self.typed::<i16>(tensor),
            DType::I32 => self.typed::<i32>(tensor),
            DType::I64 => self.typed::<i64>(tensor),
            DType::BF16 => self.typed::<bf16>(tensor),
            DType::F16 => self.typed::<f16>(tensor),
            DType::F32 => self.typed::<f32>(tensor),
            DType::F64 => self.typed::<f64>(tensor),
            dtype => Err(candle_core::Error::UnsupportedDTypeForOp(dtype, "write").into()),
        }
    }

    fn typed<T: Pod + WithDType>(&mut self, tensor: &Tensor) -> Result<()> {
        if tensor.elem_count() == 0 {
            return Ok(()); // candle cannot list an empty view
        }
        self.put(bytemuck::cast_slice(&tensor.flatten_all()?.to_vec1::<T>()?))
    }

    fn put(&mut self, bytes: &[u8]) -> Result<()> {
        disk::write(&mut self.file, &self.path, bytes).map_err(|error| failed(&self.path, &error))
    }

    /// Waits until the file is on the disk.
    pub(crate) fn finish(self) -> Result<()> {
        disk::sync(&self.file, &self.path).map_err(|error| failed(&self.path, &error))
    }
}

fn failed(path: &Path, error: &io::Error) -> Error {
    Error::file(path, format!("cannot be written ({error})"))
}
