//! A safetensors file, written tensor by tensor.
use super::dtypes;
use crate::files::digests::{Digester, FileStamp};
use crate::files::disk;
use crate::{Error, Result};
use bytemuck::Pod;
use candle_core::{DType, Tensor, WithDType};
use half::{bf16, f16};
use serde_json::json;
use std::cmp::Reverse;
use std::collections::BTreeSet;
use std::fs::File;
use std::io::{self, Seek};
use std::path::{Path, PathBuf};

/// Returns whether the format keeps a name to itself, or it is none.
pub(crate) fn is_reserved(name: &str) -> bool {
    name.is_empty() || name == "__metadata__"
}

/// A file whose header is written, and whose tensors follow.
pub(crate) struct WeightWriter {
    path: PathBuf,
    file: File,
    digester: Digester,
    /// The bytes of data that the header announces, and those that were written.
    announced: usize,
    written: usize,
}

/// A tensor in the header: name, dtype and shape.
pub(crate) type TensorHeader<'a> = (&'a str, DType, &'a [usize]);

impl WeightWriter {
    /// The order of the tensors in the file: large element sizes first, so that all are aligned.
    pub(crate) fn order(dtype: DType, name: &str) -> (Reverse<usize>, &str) {
        (Reverse(dtype.size_in_bytes()), name)
    }

    /// Creates the file, which must not be there, and writes the header for these tensors; calls `created` in between.
    pub(crate) fn create<'a>(
        path: &Path,
        tensors: impl Iterator<Item = TensorHeader<'a>>,
        created: impl FnOnce(),
    ) -> Result<Self> {
        let (mut described, mut names, mut end) = (Vec::new(), BTreeSet::new(), 0usize);
        for (name, dtype, shape) in tensors {
            if is_reserved(name) || !names.insert(name) {
                return Err(Error::file(
                    path,
                    format!("{name:?} is not a name that this file can hold once"),
                ));
            }
            let named = dtypes::name_of(dtype).ok_or_else(|| {
                Error::file(
                    path,
                    format!("{name:?} holds {}, which cannot be saved; cast it", dtype.as_str()),
                )
            })?;
            let start = end;
            end += shape.iter().product::<usize>() * dtype.size_in_bytes();
            let tensor = json!({ "dtype": named, "shape": shape, "data_offsets": [start, end] });
            described.push((json!(name).to_string(), tensor.to_string()));
        }
        let digester = Digester::new(described.into_iter(), end);
        let file = disk::create(path).map_err(|error| failed(path, &error))?;
        created();
        let mut writer = Self { path: path.into(), file, digester, announced: end, written: 0 };
        writer.put_header()?;
        Ok(writer)
    }

    fn put_header(&mut self) -> Result<()> {
        let header = self.digester.header();
        let bytes = [&(header.len() as u64).to_le_bytes(), header].concat();
        disk::write(&mut self.file, &self.path, &bytes).map_err(|error| failed(&self.path, &error))
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
        self.digester.add(bytes);
        self.written += bytes.len();
        disk::write(&mut self.file, &self.path, bytes).map_err(|error| failed(&self.path, &error))
    }

    /// Writes the digests into the header, and waits until the file is on the disk.
    pub(crate) fn finish(mut self) -> Result<FileStamp> {
        if self.written != self.announced {
            let (has, wants) = (self.written, self.announced);
            return Err(Error::file(
                &self.path,
                format!("has {has} bytes of tensors, and its header announces {wants}"),
            ));
        }
        let digest = self.digester.finish();
        self.file.rewind().map_err(|error| failed(&self.path, &error))?;
        self.put_header()?;
        disk::sync(&self.file, &self.path).map_err(|error| failed(&self.path, &error))?;
        Ok(FileStamp { length: (8 + self.digester.header().len() + self.written) as u64, digest })
    }
}

fn failed(path: &Path, error: &io::Error) -> Error {
    Error::file(path, format!("cannot be written ({error})"))
}
