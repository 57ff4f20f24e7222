//! Matrices of codes with a grid of scales, which may be read as they are stored: FP8 and other numbers of 8 bits, MXFP4 and NVFP4.
use super::super::gguf::codes::{Code, E2M1};
use super::super::gguf::scaled::{HALF_POWERS, TWICE_E2M1};
use super::super::gguf::types::Storage;
use super::super::{StoredTensor, Weights};
use super::decode::{MX_BLOCK, NV_BLOCK, of_matrix};
use super::{Scheme, SchemePiece};
use crate::kernels::{QuantizedMatrix, ScaleFormat, ScaledFormat};
use crate::{Error, Result};
use candle_core::Device;
use float8::F8E4M3;
use std::ops::Range;
use std::path::Path;
use std::sync::{Arc, LazyLock};

/// What a byte of FP8 stands for, twice that, and half of it.
static E4M3: LazyLock<Arc<[f32]>> = LazyLock::new(|| e4m3(1.0));
static TWICE_E4M3: LazyLock<Arc<[f32]>> = LazyLock::new(|| e4m3(2.0));
static HALF_E4M3: LazyLock<Arc<[f32]>> = LazyLock::new(|| e4m3(0.5));
/// What a byte with a sign stands for.
static SIGNED: LazyLock<Arc<[f32]>> =
    LazyLock::new(|| (0..=u8::MAX).map(|code| f32::from(code.cast_signed())).collect());
/// What four bits of MXFP4 and NVFP4 stand for.
static E2M1_ITSELF: LazyLock<Arc<[f32]>> = LazyLock::new(|| E2M1.iter().map(|value| value / 2.0).collect());

fn e4m3(factor: f32) -> Arc<[f32]> {
    (0..=u8::MAX).map(|code| F8E4M3::from_bits(code).to_f32() * factor).collect()
}

/// How a matrix in files stands for floats by codes with scales, of which it has the rows and columns from `start` on.
#[derive(Debug, Clone)]
pub(crate) struct StoredCodes {
    pub(crate) format: Arc<ScaledFormat>,
    start: [usize; 2],
}

impl StoredCodes {
    /// Returns where rows and columns of the matrix are among the codes.
    pub(crate) fn part(&self, part: &[Range<usize>; 2]) -> [Range<usize>; 2] {
        std::array::from_fn(|dim| self.start[dim] + part[dim].start..self.start[dim] + part[dim].end)
    }
}

/// The tensors of a matrix of codes.
struct CodeTensors<'a> {
    codes: &'a StoredTensor,
    scales: &'a StoredTensor,
    index: Option<usize>,
    format: ScaledFormat,
    /// The bytes of a row that are read together.
    unit: usize,
    /// Whether the matrix is the transpose of that of the codes.
    is_turned: bool,
    /// The rows of the codes that it has, if it does not have all of them in their order.
    order: Option<Arc<[usize]>>,
}

impl Weights {
    /// Returns whether a matrix, or each matrix of a tensor `[matrices, rows, columns]`, is stored in codes with scales, row by row: FP8,
    /// other numbers of 8 bits, MXFP4 or NVFP4, in GGUF files too.
    ///
    /// # Errors
    /// If there is no tensor of this name, or its scales are no floats.
    pub fn has_codes(&self, name: &str) -> Result<bool> {
        let stored = self.stored(name)?;
        if stored.block_format().is_some() {
            return Ok(matches!(stored.shape.len(), 2 | 3));
        }
        let count = if stored.shape.len() == 3 { stored.shape[0] } else { 1 };
        let index = |at: usize| (stored.shape.len() == 3).then_some(at);
        let is_coded = |at: usize| Ok::<_, Error>(stored.code_piece(index(at), &self.source)?.is_some());
        (0..count).try_fold(count > 0, |all, at| Ok(all && is_coded(at)?))
    }

    /// Returns how a matrix, or the matrix `index` of several, is stored in codes with scales; `None` if it is not.
    pub(crate) fn stored_codes(&self, name: &str, index: Option<usize>) -> Result<Option<StoredCodes>> {
        let stored = self.stored(name)?;
        if let Some((_, format)) = stored.block_format() {
            let is_matrix = stored.shape.len() == 2 + usize::from(index.is_some());
            return Ok(is_matrix.then(|| StoredCodes { format: format.into(), start: [0, 0] }));
        }
        let found = stored.code_piece(index, &self.source)?;
        Ok(found.map(|(piece, tensors)| StoredCodes { format: tensors.format.into(), start: piece.start }))
    }

    /// Reads the bytes of rows and columns of a matrix of codes, as [`ScaledFormat`] has them.
    ///
    /// # Errors
    /// If the matrix is not stored in codes, or a part is outside of it.
    pub(crate) fn read_codes(
        &self,
        name: &str,
        index: Option<usize>,
        part: &[Range<usize>; 2],
    ) -> Result<Vec<u8>> {
        let stored = self.stored(name)?;
        let shape = &stored.shape;
        let outer = usize::from(index.is_some());
        let fits = |(range, &size): (&Range<usize>, &usize)| range.end <= size;
        let is_inside = shape.len() == 2 + outer
            && part.iter().zip(&shape[outer..]).all(fits)
            && index.is_none_or(|at| at < shape[0]);
        if !is_inside {
            return Err(self.error(name, format!("has shape {shape:?}, and {part:?} is outside of it")));
        }
        if let Some((code, format)) = stored.block_format() {
            return self.read_scaled_blocks(stored, (code, &format), index, part);
        }
        let Some((piece, tensors)) = stored.code_piece(index, &self.source)? else {
            return Err(self.error(name, "is not stored in codes with scales; read it as a tensor"));
        };
        let codes = StoredCodes { format: tensors.format.clone().into(), start: piece.start };
        tensors.read(self, &codes.part(part))
    }
}

impl StoredTensor {
    /// Returns the type of the blocks of a GGUF file, if they are of codes with scales.
    fn block_format(&self) -> Option<(Code, ScaledFormat)> {
        match self.quantized()? {
            Storage::Codes(code) => Some((code, code.scaled()?)),
            _ => None,
        }
    }

    /// Returns the piece of a matrix of codes, which is all of it, and its tensors.
    fn code_piece(
        &self,
        index: Option<usize>,
        source: &Path,
    ) -> Result<Option<(&SchemePiece, CodeTensors<'_>)>> {
        let of_index = |piece: &&SchemePiece| match index {
            Some(at) => piece.block.len() == 3 && piece.block[0] == (at..at + 1),
            None => piece.block.len() == 2,
        };
        let outer = self.shape.len().saturating_sub(2);
        let is_whole = |piece: &&SchemePiece| {
            let matrix = piece.block.iter().zip(&self.shape).skip(outer);
            matrix.clone().count() == 2 && matrix.clone().all(|(range, &size)| *range == (0..size))
        };
        let Some(piece) = self.schemes.iter().find(of_index).filter(is_whole) else { return Ok(None) };
        let tensors = piece.scheme.code_tensors(source)?;
        let is_held = |tensors: &CodeTensors<'_>| {
            // Ranks know a matrix by the place of its codes, whatever rows it has of them.
            !tensors.is_turned && (index.is_some() || tensors.order.is_none())
        };
        Ok(tensors.filter(is_held).map(|tensors| (piece, tensors)))
    }
}

impl Scheme {
    /// Returns the tensors of a matrix of codes with scales; `None` for other schemes.
    fn code_tensors(&self, source: &Path) -> Result<Option<CodeTensors<'_>>> {
        let powers = || ScaleFormat::Table(HALF_POWERS.clone());
        let of = |table: &LazyLock<Arc<[f32]>>, scales: ScaleFormat, block: [usize; 2], factor: f32| {
            ScaledFormat { table: Arc::clone(table), scales, block, factor }
        };
        let (codes, scales, index, format, unit) = match self {
            Self::Scaled { codes, is_float, scales, block, factor, index } => {
                let table = if *is_float { &E4M3 } else { &SIGNED };
                (codes, scales, *index, of(table, scale_format(scales, source)?, *block, *factor), 1)
            }
            Self::Floats { codes, scales, bits, size, index } => {
                let of_scales =
                    if *size == NV_BLOCK { ScaleFormat::Table(HALF_E4M3.clone()) } else { powers() };
                let table = if *bits == 4 { &TWICE_E2M1 } else { &TWICE_E4M3 };
                let unit = if codes.dtype == "U8" { 1 } else { 4 };
                (codes, scales, *index, of(table, of_scales, [1, *size], 1.0), unit)
            }
            Self::Mxfp4 { codes, scales, index } => {
                let format = of(&TWICE_E2M1, powers(), [1, MX_BLOCK], 1.0);
                (codes, scales, Some(*index), format, MX_BLOCK / 2)
            }
            Self::Nvfp4 { codes, scales, factor } => {
                let of_scales = ScaleFormat::Table(E4M3.clone());
                (codes, scales, None, of(&E2M1_ITSELF, of_scales, [1, NV_BLOCK], *factor), 1)
            }
            Self::View { of, index, columns, turned } => {
                return of.viewed_codes((*index, columns, *turned), source);
            }
            _ => return Ok(None),
        };
        let is_turned = matches!(self, Self::Mxfp4 { .. });
        Ok(Some(CodeTensors { codes, scales, index, format, unit, is_turned, order: None }))
    }

    /// Returns rows and columns of a matrix of codes as floats, row by row.
    pub(super) fn decode_codes(
        &self,
        weights: &Weights,
        [rows, columns]: [Range<usize>; 2],
    ) -> Result<Vec<f32>> {
        let Some(tensors) =
            self.code_tensors(&weights.source)?.filter(|_| !rows.is_empty() && !columns.is_empty())
        else {
            return Ok(Vec::new());
        };
        let (height, width) = (rows.len(), columns.len());
        let part = if tensors.is_turned { [columns, rows] } else { [rows, columns] };
        let bytes = tensors.read(weights, &part)?;
        let matrix = QuantizedMatrix::scaled(tensors.format.clone().into(), part, bytes, &Device::Cpu)?;
        let floats = matrix.dequantize()?.flatten_all()?.to_vec1::<f32>()?;
        Ok(match tensors.is_turned {
            true => (0..height * width).map(|at| floats[at % width * height + at / width]).collect(),
            false => floats,
        })
    }
}

impl StoredTensor {
    /// Returns the tensors of a view of a matrix, whose columns `order` are rows of codes.
    fn viewed_codes(
        &self,
        (index, order, turned): (Option<usize>, &Arc<[usize]>, bool),
        source: &Path,
    ) -> Result<Option<CodeTensors<'_>>> {
        let Some(piece) = self.schemes.get(index.unwrap_or(0)) else { return Ok(None) };
        let is_whole = piece.start == [0, 0] && self.shape.ends_with(&piece.shape);
        let Some(tensors) =
            piece.scheme.code_tensors(source)?.filter(|tensors| is_whole && tensors.is_turned)
        else {
            return Ok(None);
        };
        let rows = match &tensors.order {
            None => order.clone(),
            Some(first) => order.iter().map(|&at| first[at]).collect(),
        };
        Ok(Some(CodeTensors { is_turned: !turned, order: Some(rows), ..tensors }))
    }
}

impl CodeTensors<'_> {
    /// Reads the bytes of a part of the codes.
    fn read(&self, weights: &Weights, [rows, columns]: &[Range<usize>; 2]) -> Result<Vec<u8>> {
        let order = self.order.as_ref().map(|order| &order[rows.clone()]);
        let around = match order {
            None => rows.clone(),
            Some(order) => {
                let first = order.iter().copied().min().unwrap_or(0);
                first..order.iter().copied().max().map_or(first, |last| last + 1)
            }
        };
        // Where a row of the part is among those that are read; scales of several rows have no order.
        let first_row = around.start;
        let place = |row: usize| order.map_or(row, |order| order[row] - first_row);
        let own = self.format.code_bytes(columns);
        let units = own.start / self.unit..own.end.div_ceil(self.unit);
        let size = if self.unit == 4 { 4 } else { 1 };
        let mut region = of_matrix(self.index, [around.clone(), units.clone()]);
        region.extend((self.unit > 4).then_some(0..self.unit));
        let held = self.codes.bytes(weights, &region, size)?;
        let (of_row, first) = (units.len() * self.unit, own.start - units.start * self.unit);
        let whole = order.is_none() && of_row == own.len();
        let mut made = match whole {
            true => held,
            false => {
                let row = |row: usize| &held[place(row) * of_row + first..][..own.len()];
                (0..rows.len()).flat_map(|at| row(at).iter().copied()).collect()
            }
        };
        let [of_rows, of_columns] = self.format.grid(&[around, columns.clone()]);
        let size = self.format.scales.size();
        let line = of_columns.len() * size;
        let mut part = of_matrix(self.index, [of_rows, of_columns]);
        // One scale of all columns, or of all matrices, may lack their dims.
        part.truncate(self.scales.shape.len());
        if let ([one], [1]) = (&mut part[..], &self.scales.shape[..]) {
            *one = 0..1;
        }
        let scales = self.scales.bytes(weights, &part, size)?;
        match order {
            None => made.extend(scales),
            Some(_) => (0..rows.len()).for_each(|at| made.extend(&scales[place(at) * line..][..line])),
        }
        Ok(made)
    }
}

/// Returns how scales are stored that are floats.
fn scale_format(scales: &StoredTensor, source: &Path) -> Result<ScaleFormat> {
    match &*scales.dtype {
        "F32" => Ok(ScaleFormat::F32),
        "F16" => Ok(ScaleFormat::F16),
        "BF16" => Ok(ScaleFormat::Bf16),
        other => {
            Err(Error::file(source, format!("has scales of the dtype {other}; expected F32, F16 or BF16")))
        }
    }
}
