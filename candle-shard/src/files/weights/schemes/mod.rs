//! Weights in the codes of quantized safetensors files: matrices that are computed from several tensors when they are read.
//!
#![doc = include_str!("README.md")]

mod bitsandbytes;
mod codes;
mod decode;
mod layers;
mod method;
mod mlx;
mod views;

pub(crate) use codes::StoredCodes;
pub(super) use decode::of_matrix;

use super::{StoredTensor, Weights};
use crate::Result;
use std::ops::Range;
use std::sync::Arc;

/// The tensors of a matrix `[rows, columns]`, and how its elements follow from them. The comments give the shapes.
pub(super) enum Scheme {
    /// Numbers of 8 bits `[rows, columns]`, each times the scale of its block, times a factor; or those of the matrix `index` of several.
    Scaled {
        codes: StoredTensor,
        is_float: bool,
        scales: StoredTensor,
        block: [usize; 2],
        factor: f32,
        index: Option<usize>,
    },
    /// GPTQ: `codes` `[columns / per, rows]` of 32 bits, `zeros` `[groups, rows / per]`, `scales` `[groups, rows]`, `groups` `[columns]`.
    Gptq {
        codes: StoredTensor,
        zeros: StoredTensor,
        scales: StoredTensor,
        groups: Option<StoredTensor>,
        bits: usize,
        size: usize,
        more: i32,
    },
    /// AWQ: `codes` `[columns, rows / 8]` of 32 bits, `zeros` `[groups, rows / 8]`, `scales` `[groups, rows]`.
    Awq { codes: StoredTensor, zeros: StoredTensor, scales: StoredTensor, size: usize },
    /// compressed-tensors: `codes` `[rows, columns / per]` of 32 bits, `scales` `[rows, groups]`, `zeros` `[rows / per, groups]`.
    Packed {
        codes: StoredTensor,
        scales: StoredTensor,
        zeros: Option<StoredTensor>,
        bits: usize,
        size: usize,
    },
    /// MLX: `codes` `[rows, columns / per]` of 32 bits, `scales` and `biases` `[rows, groups]`; or those of the matrix `index` of several.
    Affine {
        codes: StoredTensor,
        scales: StoredTensor,
        biases: StoredTensor,
        bits: usize,
        size: usize,
        index: Option<usize>,
    },
    /// MLX and MXFP4: `codes` `[rows, columns / per]` of 32 or 8 bits, which are floats of `bits`, and `scales` `[rows, groups]` of 8 bits;
    /// or those of the matrix `index` of several.
    Floats { codes: StoredTensor, scales: StoredTensor, bits: usize, size: usize, index: Option<usize> },
    /// The keys `[heads, latent, key]` and the values `[heads, value, latent]` of latent attention: for each head the rows of its key, then
    /// those of its value.
    Latent { keys: StoredTensor, values: StoredTensor },
    /// bitsandbytes: two codes in a byte, row after row; a scale for each `block` of them.
    Four {
        codes: StoredTensor,
        table: [f32; 16],
        scales: StoredTensor,
        block: usize,
        nested: Option<NestedScales>,
        columns: usize,
    },
    /// MXFP4: `codes` `[matrices, columns, rows / 32, 16]`, two in a byte, and `scales` `[matrices, columns, rows / 32]`, of the matrix `index`.
    Mxfp4 { codes: StoredTensor, scales: StoredTensor, index: usize },
    /// NVFP4: `codes` `[rows, columns / 2]`, two in a byte, and `scales` `[rows, columns / 16]` of 8 bits; all times a factor.
    Nvfp4 { codes: StoredTensor, scales: StoredTensor, factor: f32 },
    /// These `columns` of a tensor that is a matrix, or of its matrix `index`, in this order; perhaps transposed behind that.
    View { of: StoredTensor, index: Option<usize>, columns: Arc<[usize]>, turned: bool },
}

impl Scheme {
    pub(super) fn codes(&self) -> &StoredTensor {
        match self {
            Self::Scaled { codes, .. }
            | Self::Gptq { codes, .. }
            | Self::Awq { codes, .. }
            | Self::Packed { codes, .. }
            | Self::Affine { codes, .. }
            | Self::Floats { codes, .. }
            | Self::Mxfp4 { codes, .. }
            | Self::Nvfp4 { codes, .. }
            | Self::Four { codes, .. } => codes,
            Self::View { of, .. } | Self::Latent { keys: of, .. } => {
                of.schemes.first().map_or(of, |piece| piece.scheme.codes())
            }
        }
    }

    /// Returns the bytes of all tensors that it consists of, as far as they are those of this matrix.
    fn byte_count(&self) -> u64 {
        if let Self::View { of, index, columns, .. } = self {
            let matrices = index.map_or(1, |_| of.shape[0]).max(1) as u128;
            let all = matrices * of.shape.last().map_or(1, |&columns| columns.max(1)) as u128;
            return (u128::from(of.all_bytes()) * columns.len() as u128 / all) as u64;
        }
        if let Self::Latent { keys, values } = self {
            return keys.all_bytes() + values.all_bytes();
        }
        if let Self::Mxfp4 { codes, scales, .. }
        | Self::Scaled { codes, scales, index: Some(_), .. }
        | Self::Floats { codes, scales, index: Some(_), .. } = self
        {
            return (codes.byte_count() + scales.byte_count()) / codes.shape[0].max(1) as u64;
        }
        if let Self::Affine { codes, scales, biases, index: Some(_), .. } = self {
            let all = codes.byte_count() + scales.byte_count() + biases.byte_count();
            return all / codes.shape[0].max(1) as u64;
        }
        let others: Vec<&StoredTensor> = match self {
            Self::Scaled { scales, .. } | Self::Nvfp4 { scales, .. } | Self::Floats { scales, .. } => {
                vec![scales]
            }
            Self::Gptq { zeros, scales, groups, .. } => [zeros, scales].into_iter().chain(groups).collect(),
            Self::Awq { zeros, scales, .. } => vec![zeros, scales],
            Self::Affine { scales, biases, .. } => vec![scales, biases],
            Self::Packed { scales, zeros, .. } => [scales].into_iter().chain(zeros).collect(),
            Self::Four { scales, nested, .. } => {
                [scales].into_iter().chain(nested.as_ref().map(|nested| &nested.scales)).collect()
            }
            Self::Mxfp4 { .. } | Self::View { .. } | Self::Latent { .. } => Vec::new(),
        };
        self.codes().byte_count() + others.into_iter().map(StoredTensor::byte_count).sum::<u64>()
    }
}

/// How scales are stored as codes of 8 bits: entries of a table, times the scale of their block, plus an offset.
pub(super) struct NestedScales {
    table: Vec<f32>,
    scales: StoredTensor,
    block: usize,
    offset: f32,
}

/// A block of a tensor, whose last two dims are rows and columns of a matrix.
#[derive(Clone)]
pub(super) struct SchemePiece {
    pub(super) block: Vec<Range<usize>>,
    pub(super) scheme: Arc<Scheme>,
    /// The rows and columns of the matrix.
    shape: [usize; 2],
    /// The row and the column of the matrix at which the block begins.
    pub(super) start: [usize; 2],
}

impl StoredTensor {
    /// Returns `count` matrices one behind the other, of which `scheme` says how each follows from tensors.
    fn of_matrices(count: usize, shape: [usize; 2], scheme: impl Fn(usize) -> Scheme) -> Self {
        let schemes = (0..count).map(|at| SchemePiece::whole(scheme(at), shape).at(at)).collect();
        Self { shape: vec![count, shape[0], shape[1]], dtype: "F32".into(), pieces: Vec::new(), schemes }
    }
}

impl SchemePiece {
    /// Returns the whole matrix.
    fn whole(scheme: Scheme, shape: [usize; 2]) -> Self {
        Self {
            block: shape.iter().map(|&size| 0..size).collect(),
            scheme: Arc::new(scheme),
            shape,
            start: [0, 0],
        }
    }

    /// Returns the bytes of this part in its files, as a share of those of the matrix.
    pub(super) fn byte_count(&self) -> u64 {
        let whole = self.shape.iter().map(|&size| size as u128).product::<u128>().max(1);
        let part = u128::from(super::elements_of(&self.block));
        (u128::from(self.scheme.byte_count()) * part / whole) as u64
    }

    /// Returns the part of this one with the indices `range` of the dim `dim`, which become the first ones.
    pub(super) fn part(&self, dim: usize, range: Range<usize>) -> Self {
        let mut part = self.clone();
        if let Some(at) = (dim + 2).checked_sub(part.block.len()) {
            part.start[at] += range.start;
        }
        part.block[dim] = 0..range.len();
        part
    }

    /// Returns the same matrix with an index of a dim in front.
    pub(super) fn at(&self, index: usize) -> Self {
        let block = std::iter::once(index..index + 1).chain(self.block.iter().cloned()).collect();
        Self { block, ..self.clone() }
    }

    /// Writes the elements of this piece that are in the block `wanted` of the tensor, whose bytes are `bytes`: f32, row by row.
    pub(super) fn write(&self, weights: &Weights, wanted: &[Range<usize>], bytes: &mut [u8]) -> Result<()> {
        let overlap = |(mine, wanted): (&Range<usize>, &Range<usize>)| {
            mine.start.max(wanted.start)..mine.end.min(wanted.end)
        };
        let both: Vec<Range<usize>> = self.block.iter().zip(wanted).map(overlap).collect();
        if both.iter().any(Range::is_empty) {
            return Ok(());
        }
        let outer = both.len() - 2;
        let within = |dim: usize| {
            let from = both[outer + dim].start - self.block[outer + dim].start + self.start[dim];
            from..from + both[outer + dim].len()
        };
        let values = self.scheme.decode(weights, [within(0), within(1)])?;
        // A matrix has one index of each dim in front.
        let front = both[..outer]
            .iter()
            .zip(wanted)
            .fold(0, |at, (both, wanted)| at * wanted.len() + both.start - wanted.start);
        let (rows, columns) = (&both[outer], &both[outer + 1]);
        let (height, width) = (wanted[outer].len(), wanted[outer + 1].len());
        for (nth, values) in values.chunks_exact(columns.len()).enumerate() {
            let row = front * height + rows.start - wanted[outer].start + nth;
            let at = 4 * (row * width + columns.start - wanted[outer + 1].start);
            bytes[at..at + 4 * values.len()].copy_from_slice(bytemuck::cast_slice(values));
        }
        Ok(())
    }
}
