//! The elements of a part of a matrix, from the parts of its tensors that they need.
use super::super::{StoredTensor, Weights, read, runs};
use super::{NestedScales, Scheme};
use crate::{Error, Result};
use candle_core::Device;
use half::{bf16, f16};
use std::ops::Range;
use std::sync::atomic::Ordering;

/// The bits of a word.
pub(super) const WORD: usize = 32;
/// The codes that share a scale of MXFP4.
pub(super) const MX_BLOCK: usize = 32;
/// The codes that share a scale of NVFP4.
pub(super) const NV_BLOCK: usize = 16;
/// The rows of AWQ's codes in a word, by their place from the lowest bits on.
const AWQ_ORDER: [usize; 8] = [0, 2, 4, 6, 1, 3, 5, 7];

impl Scheme {
    /// Returns these rows and columns of the matrix, row by row.
    pub(super) fn decode(&self, weights: &Weights, [rows, columns]: [Range<usize>; 2]) -> Result<Vec<f32>> {
        let part = MatrixPart { rows, columns };
        match self {
            Self::Scaled { .. } | Self::Floats { .. } | Self::Mxfp4 { .. } | Self::Nvfp4 { .. } => {
                self.decode_codes(weights, [part.rows, part.columns])
            }
            Self::Gptq { codes, zeros, scales, groups, bits, size, more } => {
                part.gptq(weights, [codes, zeros, scales], groups.as_ref(), (*bits, *size, *more))
            }
            Self::Awq { codes, zeros, scales, size } => part.awq(weights, [codes, zeros, scales], *size),
            Self::Packed { codes, scales, zeros, bits, size } => {
                part.packed(weights, [codes, scales], zeros.as_ref(), (*bits, *size))
            }
            Self::Affine { codes, scales, biases, bits, size, index } => {
                part.affine(weights, [codes, scales, biases], (*bits, *size), *index)
            }
            Self::Latent { keys, values } => part.latent(weights, [keys, values]),
            Self::Four { codes, table, scales, block, nested, columns } => {
                part.four(weights, [codes, scales], (table, nested.as_ref()), [*block, *columns])
            }
            Self::View { of, index, columns, turned } => part.view(weights, of, *index, (columns, *turned)),
        }
    }
}

/// Rows and columns of a matrix.
pub(super) struct MatrixPart {
    pub(super) rows: Range<usize>,
    pub(super) columns: Range<usize>,
}

impl MatrixPart {
    /// Returns the elements: for each row, `of_row` returns the function from a column of the part to its element.
    pub(super) fn filled<F: FnMut(usize) -> f32>(&self, mut of_row: impl FnMut(usize) -> F) -> Vec<f32> {
        let mut out = vec![0f32; self.rows.len() * self.columns.len()];
        for (row, out) in self.rows.clone().zip(out.chunks_exact_mut(self.columns.len().max(1))) {
            let mut value = of_row(row);
            out.iter_mut().enumerate().for_each(|(at, out)| *out = value(at));
        }
        out
    }

    /// Returns for each column where its group is in those of the columns, and these. A division for each element would take
    /// most of the time.
    pub(super) fn groups(&self, size: usize) -> (Vec<usize>, Range<usize>) {
        let all = groups(&self.columns, size);
        (self.columns.clone().map(|column| column / size - all.start).collect(), all)
    }

    fn latent(&self, weights: &Weights, [keys, values]: [&StoredTensor; 2]) -> Result<Vec<f32>> {
        let (key, value, width) = (keys.shape[2], values.shape[1], self.columns.len());
        let mut out = vec![0f32; self.rows.len() * width];
        for head in groups(&self.rows, key + value) {
            // The rows of this part that begin at a row of the matrix: where they are in `out`, and among those.
            let rows = |first: usize, len: usize| {
                let (start, end) = (self.rows.start.max(first), self.rows.end.min(first + len));
                (start < end).then(|| ((start - self.rows.start) * width, start - first..end - first))
            };
            let first = head * (key + value);
            if let Some((at, rows)) = rows(first, key) {
                let height = rows.len();
                let held = keys.elements(weights, &[head..head + 1, self.columns.clone(), rows])?;
                for (i, out) in out[at..at + height * width].iter_mut().enumerate() {
                    *out = held[i % width * height + i / width];
                }
            }
            if let Some((at, rows)) = rows(first + key, value) {
                let held = values.elements(weights, &[head..head + 1, rows, self.columns.clone()])?;
                out[at..at + held.len()].copy_from_slice(&held);
            }
        }
        Ok(out)
    }

    fn view(
        &self,
        weights: &Weights,
        of: &StoredTensor,
        index: Option<usize>,
        (order, turned): (&[usize], bool),
    ) -> Result<Vec<f32>> {
        let (rows, columns) = if turned { (&self.columns, &self.rows) } else { (&self.rows, &self.columns) };
        let order = &order[columns.clone()];
        let first = order.iter().min().copied().unwrap_or(0);
        let around = first..order.iter().max().map_or(first, |last| last + 1);
        let width = around.len();
        let held = of.elements(weights, &of_matrix(index, [rows.clone(), around]))?;
        Ok(self.filled(|row| {
            let (held, row) = (&held, row - self.rows.start);
            move |at| {
                let (row, column) = if turned { (at, row) } else { (row, at) };
                held[row * width + order[column] - first]
            }
        }))
    }

    fn gptq(
        &self,
        weights: &Weights,
        [codes, zeros, scales]: [&StoredTensor; 3],
        order: Option<&StoredTensor>,
        (bits, size, more): (usize, usize, i32),
    ) -> Result<Vec<f32>> {
        let per = WORD / bits;
        let (group_of, of_columns) = match order {
            None => self.groups(size),
            Some(order) => {
                let order = order.numbers(weights, self.columns.clone())?;
                let all = around(&order);
                (order.into_iter().map(|group| group - all.start).collect(), all)
            }
        };
        let ((word_of, words), packed) = (self.groups(per), groups(&self.rows, per));
        let held = codes.words(weights, &[words, self.rows.clone()])?;
        let zero = zeros.words(weights, &[of_columns.clone(), packed.clone()])?;
        let scale = scales.part(weights, [of_columns.clone(), self.rows.clone()])?;
        let height = self.rows.len();
        Ok(self.filled(|row| {
            let at_row = row - self.rows.start;
            // What is stored is one less, in as many bits.
            let zero_of = |group: usize| {
                let stored = digit(zero[group * packed.len() + row / per - packed.start], row % per, bits);
                (stored + more) & ((1 << bits) - 1)
            };
            let zero: Vec<i32> = (0..of_columns.len()).map(zero_of).collect();
            let (held, scale, group_of, word_of, first) =
                (&held, &scale, &group_of, &word_of, self.columns.start);
            move |at| {
                let group = group_of[at];
                let code = digit(held[word_of[at] * height + at_row], (first + at) % per, bits);
                scale[group * height + at_row] * (code - zero[group]) as f32
            }
        }))
    }

    fn awq(
        &self,
        weights: &Weights,
        [codes, zeros, scales]: [&StoredTensor; 3],
        size: usize,
    ) -> Result<Vec<f32>> {
        let ((group_of, of_columns), packed) = (self.groups(size), groups(&self.rows, 8));
        let held = codes.words(weights, &[self.columns.clone(), packed.clone()])?;
        let zero = zeros.words(weights, &[of_columns.clone(), packed.clone()])?;
        let scale = scales.part(weights, [of_columns, self.rows.clone()])?;
        let (height, packed_height) = (self.rows.len(), packed.len());
        Ok(self.filled(|row| {
            let (at_row, word) = (row - self.rows.start, row / 8 - packed.start);
            let place = AWQ_ORDER.iter().position(|&of| of == row % 8).unwrap_or(0);
            let (held, zero, scale, group_of) = (&held, &zero, &scale, &group_of);
            move |at| {
                let group = group_of[at];
                let code = digit(held[at * packed_height + word], place, 4);
                let zero = digit(zero[group * packed_height + word], place, 4);
                scale[group * height + at_row] * (code - zero) as f32
            }
        }))
    }

    fn packed(
        &self,
        weights: &Weights,
        [codes, scales]: [&StoredTensor; 2],
        zeros: Option<&StoredTensor>,
        (bits, size): (usize, usize),
    ) -> Result<Vec<f32>> {
        let per = WORD / bits;
        let ((word_of, words), packed) = (self.groups(per), groups(&self.rows, per));
        let (group_of, of_columns) = self.groups(size);
        let held = codes.words(weights, &[self.rows.clone(), words.clone()])?;
        let scale = scales.part(weights, [self.rows.clone(), of_columns.clone()])?;
        let zero =
            zeros.map(|zeros| zeros.words(weights, &[packed.clone(), of_columns.clone()])).transpose()?;
        Ok(self.filled(|row| {
            let at_row = row - self.rows.start;
            let zero_of = |group: usize| match &zero {
                None => 1 << (bits - 1),
                Some(zero) => {
                    digit(zero[(row / per - packed.start) * of_columns.len() + group], row % per, bits)
                }
            };
            let zero: Vec<i32> = (0..of_columns.len()).map(zero_of).collect();
            let (held, scale) = (&held[at_row * words.len()..], &scale[at_row * of_columns.len()..]);
            let (group_of, word_of, first) = (&group_of, &word_of, self.columns.start);
            move |at| {
                let group = group_of[at];
                scale[group] * (digit(held[word_of[at]], (first + at) % per, bits) - zero[group]) as f32
            }
        }))
    }

    fn four(
        &self,
        weights: &Weights,
        [codes, scales]: [&StoredTensor; 2],
        (table, nested): (&[f32; 16], Option<&NestedScales>),
        [block, width]: [usize; 2],
    ) -> Result<Vec<f32>> {
        let mut out = Vec::with_capacity(self.rows.len() * self.columns.len());
        // Rows lie one behind the other, and their first element may be the second half of a byte.
        for row in self.rows.clone() {
            let places = row * width + self.columns.start..row * width + self.columns.end;
            let (of_bytes, of_blocks) = (groups(&places, 2), groups(&places, block));
            let held = codes.line(weights, of_bytes.clone())?;
            let scale = match nested {
                Some(nested) => nested.decode(weights, scales, of_blocks.clone())?,
                None => scales.floats(weights, &scales.within(of_blocks.clone()))?,
            };
            out.extend(places.map(|at| {
                let byte = held[at / 2 - of_bytes.start];
                let code = if at % 2 == 0 { byte >> 4 } else { byte & 15 };
                table[usize::from(code)] * scale[at / block - of_blocks.start]
            }));
        }
        Ok(out)
    }
}

impl NestedScales {
    /// Returns scales of a range of blocks.
    fn decode(&self, weights: &Weights, codes: &StoredTensor, range: Range<usize>) -> Result<Vec<f32>> {
        let held = codes.line(weights, range.clone())?;
        let of_blocks = groups(&range, self.block);
        let scale = self.scales.floats(weights, &self.scales.within(of_blocks.clone()))?;
        let value = |(at, code): (usize, u8)| {
            self.table[usize::from(code)] * scale[at / self.block - of_blocks.start] + self.offset
        };
        Ok(range.zip(held).map(value).collect())
    }
}

/// Returns the groups of so many indices in which a range is.
fn groups(range: &Range<usize>, size: usize) -> Range<usize> {
    range.start / size..range.end.div_ceil(size)
}

/// Returns a part of a matrix, or of the matrix `index` of several.
pub(in crate::files::weights) fn of_matrix(
    index: Option<usize>,
    part: [Range<usize>; 2],
) -> Vec<Range<usize>> {
    index.map(|at| at..at + 1).into_iter().chain(part).collect()
}

/// Returns the range from the least of some numbers to the largest.
fn around(numbers: &[usize]) -> Range<usize> {
    let least = numbers.iter().copied().min().unwrap_or(0);
    least..numbers.iter().copied().max().map_or(least, |most| most.saturating_add(1))
}

/// Returns the `nth` number of so many bits in a word.
fn digit(word: u32, nth: usize, bits: usize) -> i32 {
    ((word >> (bits * nth)) & ((1u64 << bits) - 1) as u32).cast_signed()
}

impl StoredTensor {
    /// Returns the bytes of a block, of elements of so many bytes.
    pub(super) fn bytes(&self, weights: &Weights, block: &[Range<usize>], size: usize) -> Result<Vec<u8>> {
        let inside = |(range, &n): (&Range<usize>, &usize)| range.end <= n;
        if block.len() != self.shape.len() || !block.iter().zip(&self.shape).all(inside) {
            let reason = format!(
                "has a quantized tensor {}{:?}, of which {block:?} is wanted",
                self.dtype, self.shape
            );
            return Err(Error::file(
                &weights.source,
                format!("{reason}; the tensors of a weight do not fit each other"),
            ));
        }
        let mut bytes = vec![0; block.iter().map(Range::len).product::<usize>() * size];
        for piece in &self.pieces {
            let runs = runs::ByteRuns::new(&piece.block, block, size);
            let read = read::read(&weights.files[piece.file], piece.at, runs, &mut bytes)?;
            weights.bytes_read.fetch_add(read, Ordering::Relaxed);
        }
        Ok(bytes)
    }

    /// Returns the bytes of a range of a tensor of bytes in the order of memory: `[n]` or `[n, 1]`.
    fn line(&self, weights: &Weights, range: Range<usize>) -> Result<Vec<u8>> {
        self.bytes(weights, &self.within(range), 1)
    }

    /// Returns all bytes of a tensor of bytes.
    pub(super) fn small(&self, weights: &Weights) -> Result<Vec<u8>> {
        let all: Vec<Range<usize>> = self.shape.iter().map(|&size| 0..size).collect();
        self.bytes(weights, &all, 1)
    }

    /// Returns a range of the first dim, and all other dims.
    pub(super) fn within(&self, range: Range<usize>) -> Vec<Range<usize>> {
        std::iter::once(range).chain(self.shape.iter().skip(1).map(|&size| 0..size)).collect()
    }

    /// Returns words of 32 bits.
    pub(super) fn words(&self, weights: &Weights, block: &[Range<usize>]) -> Result<Vec<u32>> {
        let bytes = self.bytes(weights, block, 4)?;
        Ok(bytes.as_chunks::<4>().0.iter().map(|&bytes| u32::from_le_bytes(bytes)).collect())
    }

    /// Returns groups, which are numbers of 32 or 64 bits.
    pub(super) fn numbers(&self, weights: &Weights, range: Range<usize>) -> Result<Vec<usize>> {
        let size = if self.dtype == "I64" { 8 } else { 4 };
        let bytes = self.bytes(weights, &[range], size)?;
        let number =
            |bytes: &[u8]| bytes.iter().rev().fold(0usize, |number, &byte| number << 8 | usize::from(byte));
        Ok(bytes.chunks_exact(size).map(number).collect())
    }

    /// Returns a block of scales `[rows, columns]`. A scale of all columns is `[rows, 1]` or `[rows]`, and one of all `[1]` or `[]`.
    fn part(&self, weights: &Weights, block: [Range<usize>; 2]) -> Result<Vec<f32>> {
        self.floats(weights, &block[..self.shape.len().min(2)])
    }

    /// Returns the elements of a block, which may be quantized.
    fn elements(&self, weights: &Weights, block: &[Range<usize>]) -> Result<Vec<f32>> {
        match self.quantized() {
            None if !self.schemes.is_empty() => {
                let mut values = vec![0f32; block.iter().map(Range::len).product()];
                let bytes = bytemuck::cast_slice_mut(&mut values);
                self.schemes.iter().try_for_each(|piece| piece.write(weights, block, bytes))?;
                Ok(values)
            }
            None => self.floats(weights, block),
            Some(storage) => {
                let read =
                    weights.read_dequantized("a part of a weight", self, storage, block, &Device::Cpu)?;
                Ok(read.flatten_all()?.to_vec1()?)
            }
        }
    }

    /// Returns the floats of a block.
    pub(super) fn floats(&self, weights: &Weights, block: &[Range<usize>]) -> Result<Vec<f32>> {
        let wide = |size: usize, float: fn(&[u8]) -> f32| -> Result<Vec<f32>> {
            Ok(self.bytes(weights, block, size)?.chunks_exact(size).map(float).collect())
        };
        match &*self.dtype {
            "F32" => wide(4, |bytes| f32::from_le_bytes([bytes[0], bytes[1], bytes[2], bytes[3]])),
            "F16" => wide(2, |bytes| f16::from_le_bytes([bytes[0], bytes[1]]).to_f32()),
            "BF16" => wide(2, |bytes| bf16::from_le_bytes([bytes[0], bytes[1]]).to_f32()),
            other => Err(Error::file(
                &weights.source,
                format!("has scales of the dtype {other}; expected F32, F16 or BF16"),
            )),
        }
    }
}
