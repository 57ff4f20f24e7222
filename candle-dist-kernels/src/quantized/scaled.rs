//! Weights of codes with a grid of scales, such as FP8 with a scale for each 128 by 128 codes, and MXFP4.

use std::ops::Range;
use std::sync::Arc;

use candle_core::{DType, Device, Result, Tensor, bail};
use half::{bf16, f16};

use super::floats::FloatPanels;
use crate::parallel;

/// Floats from which several threads make them.
const PARALLEL: usize = 1 << 16;

/// How a weight of codes and scales stands for floats: each is `table[code] · scale · factor`.
///
/// A part of the weight has the bytes of the codes of its rows, one row behind another, and then the scales of all blocks that it has
/// something of, row by row. It may begin and end anywhere.
#[derive(Debug, Clone, PartialEq)]
pub struct ScaledFormat {
    /// The floats that codes stand for: 256 if a code is a byte, 16 if two codes share a byte. The first of the two has the lower bits.
    pub table: Arc<[f32]>,
    /// How scales are stored.
    pub scales: ScaleFormat,
    /// The rows and columns of the codes that share a scale.
    pub block: [usize; 2],
    /// A factor of all.
    pub factor: f32,
}

/// How the scales of a weight are stored.
#[derive(Debug, Clone, PartialEq)]
pub enum ScaleFormat {
    /// As floats, from the lowest byte on.
    F32,
    /// As floats of 16 bits.
    F16,
    /// As floats of 16 bits.
    Bf16,
    /// As bytes, which stand for these 256 floats.
    Table(Arc<[f32]>),
}

impl ScaleFormat {
    /// The bytes of a scale.
    pub fn size(&self) -> usize {
        match self {
            Self::F32 => 4,
            Self::F16 | Self::Bf16 => 2,
            Self::Table(_) => 1,
        }
    }

    fn at(&self, scales: &[u8], nth: usize) -> f32 {
        match self {
            Self::F32 => {
                let four = &scales[4 * nth..][..4];
                f32::from_le_bytes([four[0], four[1], four[2], four[3]])
            }
            Self::F16 => f16::from_le_bytes([scales[2 * nth], scales[2 * nth + 1]]).to_f32(),
            Self::Bf16 => bf16::from_le_bytes([scales[2 * nth], scales[2 * nth + 1]]).to_f32(),
            Self::Table(table) => table[usize::from(scales[nth])],
        }
    }
}

impl ScaledFormat {
    /// The codes in a byte.
    pub fn per_byte(&self) -> usize {
        if self.table.len() == 16 { 2 } else { 1 }
    }

    /// The bytes of a row that have the codes of some columns.
    pub fn code_bytes(&self, columns: &Range<usize>) -> Range<usize> {
        groups(columns, self.per_byte())
    }

    /// The rows and columns of the grid of scales that some rows and columns need.
    pub fn grid(&self, [rows, columns]: &[Range<usize>; 2]) -> [Range<usize>; 2] {
        [groups(rows, self.block[0]), groups(columns, self.block[1])]
    }

    /// The bytes of the codes of a part, and those of its scales.
    pub fn byte_counts(&self, part: &[Range<usize>; 2]) -> [usize; 2] {
        let [of_rows, of_columns] = self.grid(part);
        let scales = of_rows.len() * of_columns.len() * self.scales.size();
        [part[0].len() * self.code_bytes(&part[1]).len(), scales]
    }

    /// Returns the bytes of a part of the weight from those of parts of its rows, which lie one behind another in `bytes`.
    ///
    /// # Errors
    /// If there are other bytes than those of the parts.
    pub fn join(&self, rows: &[Range<usize>], columns: &Range<usize>, bytes: &[u8]) -> Result<Vec<u8>> {
        let (Some(first), Some(last)) = (rows.first(), rows.last()) else { return Ok(Vec::new()) };
        let whole = [first.start..last.end, columns.clone()];
        let [of_codes, of_scales] = self.byte_counts(&whole);
        let [grid, across] = self.grid(&whole);
        let of_row = across.len() * self.scales.size();
        let (mut codes, mut scales) = (Vec::with_capacity(of_codes + of_scales), vec![0; of_scales]);
        let mut rest = bytes;
        for rows in rows.iter().filter(|rows| !rows.is_empty()) {
            let part = [rows.clone(), columns.clone()];
            let [own_codes, own_scales] = self.byte_counts(&part);
            let Some((own, behind)) = rest.split_at_checked(own_codes + own_scales) else { break };
            rest = behind;
            codes.extend_from_slice(&own[..own_codes]);
            // Blocks that the rows of two parts share are written twice.
            let at = (self.grid(&part)[0].start - grid.start) * of_row;
            scales[at..at + own_scales].copy_from_slice(&own[own_codes..]);
        }
        if codes.len() != of_codes || !rest.is_empty() {
            bail!("a weight of codes: {} bytes are not those of its rows {rows:?}", bytes.len());
        }
        codes.extend(scales);
        Ok(codes)
    }
}

/// The groups of `size` indices that a range overlaps.
fn groups(range: &Range<usize>, size: usize) -> Range<usize> {
    range.start / size..range.end.div_ceil(size)
}

/// Rows and columns of a weight of codes.
#[derive(Debug)]
pub(super) struct ScaledCodes {
    format: Arc<ScaledFormat>,
    part: [Range<usize>; 2],
    bytes: CodeMemory,
}

#[derive(Debug)]
enum CodeMemory {
    Host(Vec<u8>),
    /// Codes and scales on another device.
    Device([Tensor; 2]),
}

impl ScaledCodes {
    pub(super) fn new(
        format: Arc<ScaledFormat>,
        part: [Range<usize>; 2],
        bytes: Vec<u8>,
        device: &Device,
    ) -> Result<Self> {
        let (has, [of_codes, of_scales]) = (bytes.len(), format.byte_counts(&part));
        let is_table = |table: &[f32], sizes: &[usize]| sizes.contains(&table.len());
        let of_scale = match &format.scales {
            ScaleFormat::Table(table) => is_table(table, &[256]),
            _ => true,
        };
        if part.iter().any(Range::is_empty) || has != of_codes + of_scales {
            bail!("a weight of codes: {has} bytes are not those of {part:?}");
        }
        if !is_table(&format.table, &[16, 256]) || !of_scale || format.block.contains(&0) {
            bail!("a weight of codes: expected tables of 16 or 256 floats, and blocks with rows and columns");
        }
        let bytes = match device {
            Device::Cpu => CodeMemory::Host(bytes),
            device => CodeMemory::Device(on_device(&format, &part, &bytes, device)?),
        };
        Ok(Self { format, part, bytes })
    }

    /// The bytes in memory.
    pub(super) fn bytes(&self) -> usize {
        self.format.byte_counts(&self.part).iter().sum()
    }

    /// Whether the bytes are on the host.
    pub(super) fn is_on_host(&self) -> bool {
        matches!(self.bytes, CodeMemory::Host(_))
    }

    /// Returns all floats `[rows, columns]`.
    pub(super) fn dequantize(&self) -> Result<Tensor> {
        let [rows, columns] = self.dims();
        match &self.bytes {
            CodeMemory::Host(_) => {
                let mut out = vec![0.0; rows * columns];
                parallel::map(out.len() >= PARALLEL, out.chunks_mut(columns), |row, out| {
                    self.write([row..row + 1, 0..columns], out, [columns, 1]);
                });
                Tensor::from_vec(out, (rows, columns), &Device::Cpu)
            }
            CodeMemory::Device(held) => composed(&self.format, &self.part, held),
        }
    }

    /// Returns the floats of some rows that are there, one row after the other.
    pub(super) fn rows(&self, rows: &[u32]) -> Result<Vec<f32>> {
        let columns = self.dims()[1];
        if !self.is_on_host() {
            let all = self.dequantize()?;
            return all.index_select(&Tensor::new(rows, all.device())?, 0)?.flatten_all()?.to_vec1();
        }
        let mut out = vec![0.0; rows.len() * columns];
        for (&row, out) in rows.iter().zip(out.chunks_exact_mut(columns)) {
            self.write([row as usize..row as usize + 1, 0..columns], out, [columns, 1]);
        }
        Ok(out)
    }
}

impl FloatPanels for ScaledCodes {
    fn units(&self) -> [usize; 2] {
        [1, 1]
    }

    fn dims(&self) -> [usize; 2] {
        [self.part[0].len(), self.part[1].len()]
    }

    fn strides(&self, [_, columns]: [usize; 2]) -> [usize; 2] {
        // No power of two, whose multiples have few places in a cache.
        [columns | 16, 1]
    }

    fn write(&self, [rows, columns]: [Range<usize>; 2], out: &mut [f32], strides: [usize; 2]) {
        let CodeMemory::Host(bytes) = &self.bytes else { return };
        let ScaledFormat { table, scales, block: [height, width], factor } = &*self.format;
        let (codes, stored) = bytes.split_at(self.format.byte_counts(&self.part)[0]);
        let [grid, across] = self.format.grid(&self.part);
        let (of_row, per) = (self.format.code_bytes(&self.part[1]), self.format.per_byte());
        let first = self.part[1].start;
        let wanted = first + columns.start..first + columns.end;
        for (row, out) in rows.zip(out.chunks_mut(strides[0])) {
            let codes = &codes[row * of_row.len()..][..of_row.len()];
            let line = ((self.part[0].start + row) / height - grid.start) * across.len();
            let mut at = wanted.start;
            while at < wanted.end {
                let end = ((at / width + 1) * width).min(wanted.end);
                let scale = scales.at(stored, line + at / width - across.start);
                let out = &mut out[at - wanted.start..end - wanted.start];
                if per == 1 {
                    bytes_to_floats(table, &codes[at - first..end - first], [scale, *factor], out);
                } else {
                    halves_to_floats(table, &codes[at / 2 - of_row.start..], at % 2, [scale, *factor], out);
                }
                at = end;
            }
        }
    }
}

/// Writes the floats of codes of a byte. A table of a known size needs no check of each code.
fn bytes_to_floats(table: &[f32], codes: &[u8], [scale, factor]: [f32; 2], out: &mut [f32]) {
    let Some(table) = table.first_chunk::<256>() else { return };
    for (out, &code) in out.iter_mut().zip(codes) {
        *out = table[usize::from(code)] * scale * factor;
    }
}

/// Writes the floats of codes of half a byte, of which the first byte has `skipped` more before.
fn halves_to_floats(table: &[f32], codes: &[u8], skipped: usize, [scale, factor]: [f32; 2], out: &mut [f32]) {
    let Some(table) = table.first_chunk::<16>() else { return };
    // Few codes share a scale: each is multiplied once.
    let table = table.map(|value| value * scale * factor);
    let (begun, codes) = codes.split_at(skipped.min(codes.len()));
    let (second, out) = out.split_at_mut(begun.len().min(out.len()));
    for (out, code) in second.iter_mut().zip(begun) {
        *out = table[usize::from(code >> 4)];
    }
    let (pairs, last) = out.as_chunks_mut::<2>();
    for (pair, code) in pairs.iter_mut().zip(codes) {
        *pair = [table[usize::from(code & 15)], table[usize::from(code >> 4)]];
    }
    if let ([last], Some(code)) = (last, codes.get(pairs.len())) {
        *last = table[usize::from(code & 15)];
    }
}

/// Returns codes `[rows, bytes]` and scales on a device: bytes, or floats where files have floats.
fn on_device(
    format: &ScaledFormat,
    part: &[Range<usize>; 2],
    bytes: &[u8],
    device: &Device,
) -> Result<[Tensor; 2]> {
    let (codes, stored) = bytes.split_at(format.byte_counts(part)[0]);
    let [of_rows, of_columns] = format.grid(part).map(|range| range.len());
    let codes = Tensor::from_slice(codes, (part[0].len(), codes.len() / part[0].len()), device)?;
    let scales = match &format.scales {
        ScaleFormat::Table(_) => Tensor::from_slice(stored, (of_rows, of_columns), device)?,
        scales => {
            let floats: Vec<f32> = (0..of_rows * of_columns).map(|nth| scales.at(stored, nth)).collect();
            Tensor::from_vec(floats, (of_rows, of_columns), device)?
        }
    };
    Ok([codes, scales])
}

/// Returns the floats of a part by candle's operations.
fn composed(
    format: &ScaledFormat,
    part: &[Range<usize>; 2],
    [codes, scales]: &[Tensor; 2],
) -> Result<Tensor> {
    let device = codes.device();
    let [rows, columns] = part;
    // As bytes, the index 255 would be no row for candle.
    let rows_at = |bytes: &Tensor| bytes.flatten_all()?.to_dtype(DType::U32);
    let of_bytes = |table: &[f32], bytes: &Tensor| {
        Tensor::new(table, device)?.index_select(&rows_at(bytes)?, 0)?.reshape(bytes.dims())
    };
    let values = match format.per_byte() {
        1 => of_bytes(&format.table, codes)?,
        per => {
            let pairs: Vec<f32> =
                (0..256).flat_map(|byte| [format.table[byte & 15], format.table[byte >> 4]]).collect();
            let pairs = Tensor::from_vec(pairs, (256, per), device)?;
            let all = pairs.index_select(&rows_at(codes)?, 0)?.reshape((rows.len(), ()))?;
            let held = format.code_bytes(columns);
            all.narrow(1, columns.start - held.start * per, columns.len())?
        }
    };
    let scales = match &format.scales {
        ScaleFormat::Table(table) => of_bytes(table, scales)?,
        _ => scales.clone(),
    };
    let [grid, across] = format.grid(part);
    let places = |range: &Range<usize>, size: usize, first: usize| {
        let places: Vec<u32> = range.clone().map(|at| (at / size - first) as u32).collect();
        Tensor::new(places, device)
    };
    let scales = scales.index_select(&places(rows, format.block[0], grid.start)?, 0)?;
    let scales = scales.index_select(&places(columns, format.block[1], across.start)?, 1)?;
    (values * scales)?.affine(f64::from(format.factor), 0.0)?.to_dtype(DType::F32)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::{QuantizedMatrix, dequantized_linear, linear, quantized_linear};
    use candle_core::Var;

    /// The formats of FP8 in blocks, by rows and by tensors, and of four bits with scales of a byte.
    fn formats(dims: [usize; 2]) -> Vec<ScaledFormat> {
        let eight: Arc<[f32]> = (0..256).map(|code| (code as f32 * 0.37).sin()).collect();
        let four: Arc<[f32]> = (0..16).map(|code| code as f32 - 7.5).collect();
        let powers: Arc<[f32]> = (0..256).map(|code| 2f32.powi(code % 9 - 4)).collect();
        let of = |table: &Arc<[f32]>, scales, block, factor| ScaledFormat {
            table: table.clone(),
            scales,
            block,
            factor,
        };
        vec![
            of(&eight, ScaleFormat::F32, [16, 24], 1.0),
            of(&eight, ScaleFormat::Bf16, [1, dims[1]], 1.0),
            of(&eight, ScaleFormat::F16, dims, 0.3),
            of(&four, ScaleFormat::Table(powers.clone()), [1, 32], 1.0),
            of(&eight, ScaleFormat::Table(powers), [3, 5], 1.0),
        ]
    }

    /// Bytes of a whole weight, and the floats that they stand for, by the definition.
    fn whole(format: &ScaledFormat, [rows, columns]: [usize; 2]) -> (Vec<u8>, Vec<f32>) {
        let [of_codes, of_scales] = format.byte_counts(&[0..rows, 0..columns]);
        let mut bytes: Vec<u8> =
            (0..of_codes).map(|i| (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).to_be_bytes()[0]).collect();
        let across = columns.div_ceil(format.block[1]);
        let scale = |nth: usize| 0.25 + (nth % 7) as f32 * 0.5;
        for nth in 0..of_scales / format.scales.size() {
            match &format.scales {
                ScaleFormat::F32 => bytes.extend(scale(nth).to_le_bytes()),
                ScaleFormat::F16 => bytes.extend(f16::from_f32(scale(nth)).to_le_bytes()),
                ScaleFormat::Bf16 => bytes.extend(bf16::from_f32(scale(nth)).to_le_bytes()),
                ScaleFormat::Table(_) => bytes.push((nth * 31) as u8),
            }
        }
        let of_row = columns.div_ceil(format.per_byte());
        let value = |row: usize, column: usize| {
            let byte = bytes[row * of_row + column / format.per_byte()];
            let code = if format.per_byte() == 2 { byte >> (4 * (column % 2)) & 15 } else { byte };
            let nth = row / format.block[0] * across + column / format.block[1];
            let scale = match &format.scales {
                ScaleFormat::Table(table) => table[nth * 31 % 256],
                _ => scale(nth),
            };
            format.table[usize::from(code)] * scale * format.factor
        };
        let floats = (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column)));
        let floats = floats.map(|(row, column)| value(row, column)).collect();
        (bytes, floats)
    }

    /// Returns the bytes of a part of a whole weight.
    fn cut(format: &ScaledFormat, dims: [usize; 2], bytes: &[u8], part: &[Range<usize>; 2]) -> Vec<u8> {
        let [of_codes, _] = format.byte_counts(&[0..dims[0], 0..dims[1]]);
        let (codes, scales) = bytes.split_at(of_codes);
        let (row, own) = (of_codes / dims[0], format.code_bytes(&part[1]));
        let mut made: Vec<u8> =
            part[0].clone().flat_map(|at| codes[at * row..][own.clone()].to_vec()).collect();
        let [of_rows, of_columns] = format.grid(part);
        let (size, across) = (format.scales.size(), dims[1].div_ceil(format.block[1]));
        for at in of_rows {
            made.extend(&scales[(at * across + of_columns.start) * size..][..of_columns.len() * size]);
        }
        made
    }

    #[test]
    fn parts_that_begin_inside_of_blocks_stand_for_the_floats_and_multiply_as_they_do() {
        let dims = [70, 320];
        for (nth, format) in formats(dims).into_iter().enumerate() {
            let (bytes, floats) = whole(&format, dims);
            let floats = Tensor::from_vec(floats, &dims, &Device::Cpu).unwrap();
            let format = Arc::new(format);
            for part in [[0..70, 0..320], [1..34, 0..320], [0..70, 33..320], [17..70, 5..290], [3..4, 7..8]] {
                let own = cut(&format, dims, &bytes, &part);
                let matrix =
                    QuantizedMatrix::scaled(format.clone(), part.clone(), own.clone(), &Device::Cpu).unwrap();
                assert_eq!(
                    (matrix.bytes(), matrix.dims()),
                    (own.len(), part.clone().map(|range| range.len()))
                );
                let want = floats.narrow(0, part[0].start, part[0].len()).unwrap();
                let want = want.narrow(1, part[1].start, part[1].len()).unwrap().contiguous().unwrap();
                let made = matrix.dequantize().unwrap().to_vec2::<f32>().unwrap();
                let want_rows = want.to_vec2::<f32>().unwrap();
                assert!(made == want_rows, "{nth} {part:?}");
                let last = part[0].len() - 1;
                assert_eq!(
                    matrix.rows(&[last as u32, 0]).unwrap(),
                    [&want_rows[last][..], &want_rows[0]].concat()
                );
                assert!(matrix.rows(&[part[0].len() as u32]).is_err());
                // What other devices compute.
                let held = on_device(&format, &part, &own, &Device::Cpu).unwrap();
                let made = composed(&format, &part, &held).unwrap().to_vec2::<f32>().unwrap();
                assert!(made == want_rows, "{nth} {part:?}");
                let x = Var::rand(-1f32, 1.0, (2, 9, part[1].len()), &Device::Cpu).unwrap();
                let of_floats = |y: &Tensor| {
                    let grads = y.sqr().unwrap().sum_all().unwrap().backward().unwrap();
                    let of_x = grads.get(&x).unwrap().flatten_all().unwrap();
                    [y.flatten_all().unwrap(), of_x].map(|all| all.to_vec1::<f32>().unwrap())
                };
                let made = of_floats(&dequantized_linear(&x, &matrix).unwrap());
                let want = of_floats(&linear(&x, &want, None).unwrap());
                for (made, want) in made.iter().zip(&want) {
                    let most = want.iter().fold(0f32, |most, x| most.max(x.abs()));
                    let far = made.iter().zip(want).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
                    assert!(far <= 2e-6 * most, "{nth} {part:?}: {far} of {most}");
                }
                assert!(quantized_linear(&x, &[&matrix]).unwrap_err().to_string().contains("scales"));
                let short = own[1..].to_vec();
                assert!(
                    QuantizedMatrix::scaled(format.clone(), part.clone(), short, &Device::Cpu).is_err(),
                    "{nth} {part:?}"
                );
            }
        }
    }

    #[test]
    fn rows_of_parts_are_joined_where_blocks_are_shared() {
        let dims = [70, 320];
        for format in formats(dims) {
            let (bytes, _) = whole(&format, dims);
            for rows in [vec![5..20, 20..20, 20..21, 21..66], vec![0..1, 1..70], vec![0..35, 35..70]] {
                let columns = 9..300;
                let parts = rows.iter().filter(|rows| !rows.is_empty());
                let parts: Vec<u8> = parts
                    .flat_map(|rows| cut(&format, dims, &bytes, &[rows.clone(), columns.clone()]))
                    .collect();
                let all = rows[0].start..rows[rows.len() - 1].end;
                let want = cut(&format, dims, &bytes, &[all, columns.clone()]);
                assert_eq!(format.join(&rows, &columns, &parts).unwrap(), want);
                assert!(format.join(&rows, &columns, &parts[1..]).is_err());
            }
        }
    }
}
