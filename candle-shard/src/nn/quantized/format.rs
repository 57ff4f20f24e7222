//! How files store weights that stay quantized.
use crate::files::weights::StoredCodes;
use crate::kernels::QuantizedMatrix;
use crate::{Result, Weights};
use candle_core::Device;
use candle_core::quantized::GgmlDType;
use std::ops::Range;

/// How files store a weight `[out, in]`, or one of several.
#[derive(Debug, Clone)]
pub(in crate::nn) enum WeightFormat {
    /// In blocks of a row, as GGUF files have them.
    Blocks(GgmlDType),
    /// In codes with scales.
    Codes(StoredCodes),
}

impl WeightFormat {
    /// The columns between which the weight may be cut.
    pub(in crate::nn) fn columns(&self) -> usize {
        match self {
            Self::Blocks(dtype) => dtype.block_size(),
            Self::Codes(_) => 1,
        }
    }

    /// The bytes of rows and columns.
    pub(in crate::nn) fn byte_count(&self, part: &[Range<usize>; 2]) -> usize {
        match self {
            Self::Blocks(dtype) => part[0].len() * (part[1].len() / dtype.block_size()) * dtype.type_size(),
            Self::Codes(_) if part[0].is_empty() => 0,
            Self::Codes(codes) => codes.format.byte_counts(&codes.part(part)).iter().sum(),
        }
    }

    /// Reads rows and columns of the tensor of this name, or of its matrix of this index.
    pub(in crate::nn) fn read(
        &self,
        weights: &Weights,
        (name, index): (&str, Option<usize>),
        part: &[Range<usize>; 2],
        device: &Device,
    ) -> Result<QuantizedMatrix> {
        match self {
            Self::Blocks(_) => {
                let (dtype, read) = weights.read_quantized_matrix(name, index, part.clone())?;
                Ok(QuantizedMatrix::of_blocks(dtype, [part[0].len(), part[1].len()], read.bytes(), device)?)
            }
            Self::Codes(codes) => {
                let bytes = weights.read_codes(name, index, part)?;
                Ok(QuantizedMatrix::scaled(codes.format.clone(), codes.part(part), bytes, device)?)
            }
        }
    }

    /// Reads the bytes of rows and columns.
    pub(in crate::nn) fn read_bytes(
        &self,
        weights: &Weights,
        (name, index): (&str, Option<usize>),
        part: &[Range<usize>; 2],
    ) -> Result<Vec<u8>> {
        match self {
            Self::Blocks(_) => {
                let (_, read) = weights.read_quantized_matrix(name, index, part.clone())?;
                Ok(read.bytes().to_vec())
            }
            Self::Codes(_) => weights.read_codes(name, index, part),
        }
    }

    /// Returns the matrix of rows that lie one behind another, from the bytes of each range of them.
    pub(in crate::nn) fn join(
        &self,
        rows: &[Range<usize>],
        columns: &Range<usize>,
        bytes: Vec<u8>,
        device: &Device,
    ) -> Result<QuantizedMatrix> {
        let count = rows.iter().map(Range::len).sum::<usize>();
        match self {
            Self::Blocks(dtype) => {
                Ok(QuantizedMatrix::of_blocks(*dtype, [count, columns.len()], &bytes, device)?)
            }
            Self::Codes(codes) => {
                let of = |rows: &Range<usize>| codes.part(&[rows.clone(), columns.clone()]);
                let parts: Vec<_> = rows.iter().map(|rows| of(rows)[0].clone()).collect();
                let first = rows.first().map_or(0, |rows| rows.start);
                let whole = of(&(first..first + count));
                let bytes = codes.format.join(&parts, &whole[1], &bytes)?;
                Ok(QuantizedMatrix::scaled(codes.format.clone(), whole, bytes, device)?)
            }
        }
    }
}
