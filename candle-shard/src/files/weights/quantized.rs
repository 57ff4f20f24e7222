//! Blocks of quantized tensors: read as they are stored, or as the floats that they stand for.
use super::gguf::codes::Code;
use super::gguf::types::{self, Storage};
use super::{StoredTensor, Weights, read, runs, schemes};
use crate::Result;
use crate::kernels::ScaledFormat;
use candle_core::quantized::{GgmlDType, QStorage, QTensor};
use candle_core::{Device, Tensor};
use std::borrow::Cow;
use std::ops::Range;
use std::sync::atomic::Ordering;

impl Weights {
    /// Returns the type of the blocks in which a tensor is stored; `None` if its elements are stored one by one, or in
    /// blocks that candle has no products of, such as IQ4_XS: these are read as floats.
    ///
    /// # Errors
    /// If there is no tensor of this name.
    pub fn quantized_dtype(&self, name: &str) -> Result<Option<GgmlDType>> {
        Ok(self.stored(name)?.blocks())
    }

    /// Reads rows and columns of a quantized matrix as they are stored. Nothing is quantized again.
    ///
    /// # Errors
    /// If there is no tensor of this name, it is not quantized or no matrix, the rows or columns are empty or outside
    /// of it, the columns do not begin and end between blocks, or the file cannot be read.
    pub fn read_quantized(&self, name: &str, block: [Range<usize>; 2], device: &Device) -> Result<QTensor> {
        let dims = (block[0].len(), block[1].len());
        let (dtype, read) = self.read_quantized_matrix(name, None, block)?;
        let storage = QStorage::from_data(Cow::Borrowed(read.bytes()), device, dtype)?;
        Ok(QTensor::new(storage, dims)?)
    }

    /// Reads the blocks of rows and columns of a matrix, or of the matrix `index` of several.
    pub(crate) fn read_quantized_matrix(
        &self,
        name: &str,
        index: Option<usize>,
        [rows, columns]: [Range<usize>; 2],
    ) -> Result<(GgmlDType, AlignedBytes)> {
        let stored = self.stored(name)?;
        let Some(dtype) = stored.blocks() else {
            let why = match stored.quantized() {
                Some(_) => "blocks that candle has no products of",
                None => "not quantized",
            };
            let reason = format!("is stored as {}, {why}; read it as a tensor", stored.dtype);
            return Err(self.error(name, reason));
        };
        let region: Vec<Range<usize>> = index
            .map(|at| at..at.saturating_add(1))
            .into_iter()
            .chain([rows.clone(), columns.clone()])
            .collect();
        let shape = &stored.shape;
        let is_inside =
            shape.len() == region.len() && region.iter().zip(shape).all(|(range, &size)| range.end <= size);
        if !is_inside || rows.is_empty() || columns.is_empty() {
            let want = if index.is_some() { "some matrices" } else { "a matrix" };
            let reason = format!("has shape {shape:?}; want {want}, and rows and columns of it");
            return Err(self.error(name, format!("{reason} instead of {region:?}")));
        }
        let size = dtype.block_size();
        if [columns.start, columns.end].iter().any(|at| !at.is_multiple_of(size)) {
            let reason = format!("has blocks of {size} columns, and columns {columns:?} cut one");
            return Err(self.error(name, format!("{reason}; cut between blocks, or read floats")));
        }
        Ok((dtype, self.read_blocks(stored, Storage::Blocks(dtype), &region)?))
    }

    /// Reads the bytes of rows and columns of a matrix, or of the matrix `index` of several, in blocks of floats of four bits, as `format` has
    /// them.
    pub(super) fn read_scaled_blocks(
        &self,
        stored: &StoredTensor,
        (code, format): (Code, &ScaledFormat),
        index: Option<usize>,
        [rows, columns]: &[Range<usize>; 2],
    ) -> Result<Vec<u8>> {
        let (size, _) = code.block();
        let around = columns.start / size * size..columns.end.next_multiple_of(size);
        let region = schemes::of_matrix(index, [rows.clone(), around.clone()]);
        let read = self.read_blocks(stored, Storage::Codes(code), &region)?;
        Ok(code.scaled_bytes(format, read.bytes(), columns, &around))
    }

    /// Reads a block of a quantized tensor as f32. It may begin and end anywhere.
    pub(super) fn read_dequantized(
        &self,
        name: &str,
        stored: &StoredTensor,
        storage: Storage,
        block: &[Range<usize>],
        device: &Device,
    ) -> Result<Tensor> {
        let shape: Vec<usize> = block.iter().map(Range::len).collect();
        let Some(last) = block.len().checked_sub(1) else {
            return Err(self
                .error(name, format!("is a number of blocks of {}; expected a dim at least", stored.dtype)));
        };
        let (size, _) = storage.block();
        if shape.contains(&0) {
            return Ok(Tensor::zeros(shape, candle_core::DType::F32, device)?);
        }
        let mut around = block.to_vec();
        around[last] = block[last].start / size * size..block[last].end.next_multiple_of(size);
        let read = self.read_blocks(stored, storage, &around)?;
        let dims: Vec<usize> = around.iter().map(Range::len).collect();
        let values = match storage {
            Storage::Blocks(dtype) => {
                let storage = QStorage::from_data(Cow::Borrowed(read.bytes()), &Device::Cpu, dtype)?;
                QTensor::new(storage, dims)?.dequantize(&Device::Cpu)?
            }
            Storage::Codes(code) => {
                let mut values = vec![0.0; dims.iter().product()];
                code.decode(read.bytes(), &mut values);
                Tensor::from_vec(values, dims, &Device::Cpu)?
            }
            Storage::Plain(dtype) => {
                return Err(
                    self.error(name, format!("is stored as {}, which is not quantized", dtype.as_str()))
                );
            }
        };
        let values = values.narrow(last, block[last].start - around[last].start, shape[last])?;
        Ok(values.contiguous()?.to_device(device)?)
    }

    /// Reads the bytes of the blocks of a region whose last dim begins and ends between blocks.
    fn read_blocks(
        &self,
        stored: &StoredTensor,
        storage: Storage,
        region: &[Range<usize>],
    ) -> Result<AlignedBytes> {
        let (elements, size) = storage.block();
        let in_blocks = |block: &[Range<usize>]| {
            let mut block = block.to_vec();
            if let Some(last) = block.last_mut() {
                *last = last.start / elements..last.end / elements;
            }
            block
        };
        let region = in_blocks(region);
        let count = region.iter().map(Range::len).product::<usize>();
        let mut read = AlignedBytes::new(count * size);
        for piece in &stored.pieces {
            let runs = runs::ByteRuns::new(&in_blocks(&piece.block), &region, size);
            let bytes = read::read(&self.files[piece.file], piece.at, runs, read.bytes_mut())?;
            self.bytes_read.fetch_add(bytes, Ordering::Relaxed);
        }
        Ok(read)
    }
}

impl StoredTensor {
    /// Returns the type of the blocks in which the tensor is stored, if it is in blocks that candle computes with.
    fn blocks(&self) -> Option<GgmlDType> {
        match self.quantized()? {
            Storage::Blocks(blocks) => Some(blocks),
            _ => None,
        }
    }

    /// Returns how the tensor is stored, if it is in blocks.
    pub(super) fn quantized(&self) -> Option<Storage> {
        types::quantized(&self.dtype)
    }
}

/// Bytes that begin at a multiple of eight, since candle panics if blocks are not aligned.
pub(crate) struct AlignedBytes {
    memory: Vec<u64>,
    len: usize,
}

impl AlignedBytes {
    fn new(len: usize) -> Self {
        Self { memory: vec![0; len.div_ceil(8)], len }
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        &bytemuck::cast_slice(&self.memory)[..self.len]
    }

    fn bytes_mut(&mut self) -> &mut [u8] {
        &mut bytemuck::cast_slice_mut(&mut self.memory)[..self.len]
    }
}
