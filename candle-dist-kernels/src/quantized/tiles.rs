//! Quantized weights in tiles of sixteen rows, and products with them.

use candle_core::quantized::GgmlDType;
use candle_core::{Result, bail};
use half::f16;
use std::fmt;
use std::marker::PhantomData;

#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
#[cfg(all(target_arch = "x86_64", feature = "avx512"))]
use super::avx512::Avx512;
use super::blocks::CodeBlock;
use super::format::{self, CHUNK, COLUMNS, CodeLayout, Format, GROUPS, ROWS, Scales, with_format};
use super::inputs::InputBlock;
use super::kernel::TileProduct;
use super::lanes::Lanes;
use super::portable::PortableLanes;
use crate::parallel;

/// The most rows of a product that tokens need one at a time.
const FEW: usize = 4;

/// Multiplications from which several threads share a product.
const PARALLEL: usize = 1 << 17;

/// Results from which several threads put them into their places, and the rows of a thread's piece.
const PARALLEL_COPY: usize = 1 << 16;
const COPIED_ROWS: usize = 16;

/// Bytes of blocks from which several threads pack them.
const PARALLEL_PACKING: usize = 1 << 16;

/// Multiplications of a thread's piece of a product.
const PIECE: usize = 1 << 17;

/// The instructions that products use.
#[derive(Debug, Clone, Copy)]
pub(super) enum Processor {
    #[cfg(all(target_arch = "x86_64", feature = "avx512"))]
    Avx512(Avx512),
    #[cfg(target_arch = "x86_64")]
    Avx2(Avx2),
    Portable,
}

impl Processor {
    /// All that this processor has, the fastest first.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        [
            #[cfg(all(target_arch = "x86_64", feature = "avx512"))]
            Avx512::new().map(Self::Avx512),
            #[cfg(target_arch = "x86_64")]
            Avx2::new().map(Self::Avx2),
            Some(Self::Portable),
        ]
        .into_iter()
        .flatten()
    }

    /// The fastest.
    pub(super) fn best() -> Self {
        Self::all().next().unwrap_or(Self::Portable)
    }
}

/// A weight `[rows, columns]`.
pub(super) struct Tiles {
    memory: Vec<u8>,
    /// Where tiles begin in memory: at the start of a cache line.
    start: usize,
    layout: CodeLayout,
    pub(super) dtype: GgmlDType,
    pub(super) rows: usize,
    pub(super) columns: usize,
}

impl Tiles {
    /// Packs the blocks of a type as files store them.
    pub(super) fn new(dtype: GgmlDType, [rows, columns]: [usize; 2], stored: &[u8]) -> Result<Self> {
        let Some(layout) = format::layout(dtype) else {
            bail!("quantized_linear: {dtype:?} is no type of weights; convert it to one, such as Q8_0");
        };
        let per_row = columns / layout.columns;
        if columns == 0
            || !columns.is_multiple_of(layout.columns)
            || stored.len() != rows * per_row * layout.stored
        {
            let bytes = stored.len();
            bail!("quantized_linear: {bytes} bytes do not make a weight [{rows}, {columns}] of {dtype:?}");
        }
        let size = rows.div_ceil(ROWS) * per_row * layout.block();
        let memory = vec![0; size + CHUNK];
        let start = memory.as_ptr().align_offset(CHUNK).min(CHUNK);
        let mut tiles = Self { memory, start, layout, dtype, rows, columns };
        with_format!(dtype, F => tiles.pack::<F>(stored));
        Ok(tiles)
    }

    fn pack<F: Format>(&mut self, stored: &[u8]) {
        let (dtype, per_row, row_bytes) = (self.dtype, self.columns / F::LAYOUT.columns, self.row_bytes());
        let tiles = self.memory[self.start..].chunks_exact_mut(row_bytes);
        let rows = stored.chunks(ROWS * per_row * F::LAYOUT.stored);
        parallel::map(stored.len() >= PARALLEL_PACKING, tiles.zip(rows), |_, (tiles, stored)| {
            let mut block = CodeBlock::new();
            for (i, bytes) in stored.chunks_exact(F::LAYOUT.stored).enumerate() {
                block.read(dtype, bytes);
                put::<F>(&mut tiles[i % per_row * F::LAYOUT.block()..], i / per_row, &block);
            }
        });
    }

    /// The bytes of the tiles.
    pub(super) fn bytes(&self) -> usize {
        self.tiles().len()
    }

    pub(super) fn tiles(&self) -> &[u8] {
        &self.memory[self.start..][..self.memory.len() - CHUNK]
    }

    /// The bytes of a row of tiles.
    pub(super) fn row_bytes(&self) -> usize {
        self.columns / self.layout.columns * self.layout.block()
    }

    /// Writes the floats that a row stands for.
    pub(super) fn dequantize_row(&self, row: usize, out: &mut [f32]) {
        let (layout, r) = (self.layout, row % ROWS);
        let tile_row = &self.tiles()[row / ROWS * self.row_bytes()..][..self.row_bytes()];
        let half = |bytes: &[u8], at: usize| f16::from_le_bytes([bytes[at], bytes[at + 1]]).to_f32();
        for (block, out) in tile_row.chunks_exact(layout.block()).zip(out.chunks_exact_mut(layout.columns)) {
            let (header, tiles) = block.split_at(layout.header());
            let scale = half(header, 2 * r);
            let minimum = if layout.has_minimum() { half(header, 2 * (ROWS + r)) } else { 0.0 };
            for (tile, out) in tiles.chunks_exact(layout.tile()).zip(out.chunks_exact_mut(COLUMNS)) {
                let (scales, planes) = tile.split_at(layout.scales_bytes());
                for (column, out) in out.iter_mut().enumerate() {
                    let bits = |CodeBits { chunk, shift, bits, of_code }: CodeBits| {
                        (planes[chunk * CHUNK + 4 * r + column % 4] >> shift & mask(bits)) << of_code
                    };
                    let code = places(layout, column / 4).map(bits).fold(0, |code, bits| code | bits);
                    let code = (i32::from(code) - layout.zero) as f32;
                    let own = || scales[column / 16 * ROWS + r];
                    *out = match layout.scales {
                        Scales::Whole if layout.adds => code * scale + minimum,
                        Scales::Whole => code * scale,
                        Scales::Of16 => scale * f32::from(own().cast_signed()) * code,
                        Scales::Of32 => {
                            scale * f32::from(scales[r]) * code - minimum * f32::from(scales[ROWS + r])
                        }
                        Scales::Pairs => {
                            scale * f32::from(own() & 15) * code - minimum * f32::from(own() >> 4)
                        }
                    };
                }
            }
        }
    }

    /// Writes the products of these rows with `m` rows of inputs to the columns from `first` of `out`, whose rows are
    /// `width` long.
    pub(super) fn product(
        &self,
        processor: Processor,
        x: &[InputBlock],
        m: usize,
        out: &mut [f32],
        first: usize,
    ) {
        let width = out.len() / m;
        let made = match processor {
            #[cfg(all(target_arch = "x86_64", feature = "avx512"))]
            Processor::Avx512(lanes) => self.product_with(lanes, x, m),
            #[cfg(target_arch = "x86_64")]
            Processor::Avx2(lanes) => self.product_with(lanes, x, m),
            Processor::Portable => self.product_with(PortableLanes, x, m),
        };
        let copy = |start: usize, out: &mut [f32]| {
            let rows = out.len() / width;
            for (tile, made) in made.chunks_exact(m).enumerate() {
                let here = (self.rows - tile * ROWS).min(ROWS);
                for (made, out) in made[start..][..rows].iter().zip(out.chunks_exact_mut(width)) {
                    out[first + tile * ROWS..][..here].copy_from_slice(&made[..here]);
                }
            }
        };
        let is_shared = m * self.rows >= PARALLEL_COPY;
        let rows = if is_shared { COPIED_ROWS } else { m };
        parallel::map(is_shared, out.chunks_mut(rows * width), |i, out| copy(i * rows, out));
    }

    /// Returns, for each row of tiles and each row of inputs, sixteen results.
    fn product_with<L: Lanes>(&self, lanes: L, x: &[InputBlock], m: usize) -> Vec<[f32; ROWS]> {
        let mut out = vec![[0.0; ROWS]; self.rows.div_ceil(ROWS) * m];
        let width = self.columns / COLUMNS;
        let row_bytes = self.row_bytes();
        let run = |(tiles, out): (&[u8], &mut [[f32; ROWS]])| {
            with_format!(self.dtype, F => lanes.run(TileProduct { tiles, x, width, out, format: PhantomData::<F> }));
        };
        let work = self.columns * m * ROWS;
        if out.len() / m * work >= PARALLEL && parallel::threads() > 1 {
            if m <= FEW {
                parallel::keep_awake();
            }
            let rows = (PIECE / work).max(1);
            let parts = self.tiles().chunks(rows * row_bytes).zip(out.chunks_mut(rows * m));
            parallel::map(true, parts, |_, part| run(part));
        } else {
            run((self.tiles(), &mut out));
        }
        out
    }
}

impl fmt::Debug for Tiles {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tiles({:?} [{}, {}])", self.dtype, self.rows, self.columns)
    }
}

/// Packs a block of the row `r` of sixteen to the front of `to`.
fn put<F: Format>(to: &mut [u8], r: usize, block: &CodeBlock) {
    let layout = F::LAYOUT;
    let (header, tiles) = to[..layout.block()].split_at_mut(layout.header());
    header[2 * r..][..2].copy_from_slice(&block.scale);
    if layout.has_minimum() {
        header[2 * (ROWS + r)..][..2].copy_from_slice(&block.minimum);
    }
    for (t, tile) in tiles.chunks_exact_mut(layout.tile()).enumerate() {
        let (scales, planes) = tile.split_at_mut(layout.scales_bytes());
        match layout.scales {
            Scales::Whole => {}
            Scales::Of32 => (scales[r], scales[ROWS + r]) = (block.scales[t], block.minimums[t]),
            Scales::Of16 | Scales::Pairs => {
                (scales[r], scales[ROWS + r]) = (block.scales[2 * t], block.scales[2 * t + 1]);
            }
        }
        let (groups, _) = block.codes[t * COLUMNS..][..COLUMNS].as_chunks();
        let words: [u32; GROUPS] = std::array::from_fn(|group| u32::from_le_bytes(groups[group]));
        for (bits, first) in [(layout.low, 0), (layout.high, layout.low)] {
            // The four bytes of a word stay apart, as no byte gets more than eight bits.
            let of_each = u32::from_le_bytes([mask(bits); 4]);
            for chunk in 0..bits {
                let groups = (chunk..GROUPS as u32).step_by(bits as usize);
                let word = groups.enumerate().fold(0, |word, (i, group)| {
                    word | (words[group as usize] >> first & of_each) << (bits * i as u32)
                });
                planes[(first + chunk) as usize * CHUNK + 4 * r..][..4].copy_from_slice(&word.to_le_bytes());
            }
        }
    }
}

fn mask(bits: u32) -> u8 {
    ((1u32 << bits) - 1) as u8
}

/// The place of some bits of the codes of a group of columns.
#[derive(Debug, Clone, Copy)]
struct CodeBits {
    chunk: usize,
    /// The first bit in a byte of the chunk, and how many they are.
    shift: u32,
    bits: u32,
    /// The first bit in the code.
    of_code: u32,
}

/// Returns the places of the low and the high bits of a group.
#[inline(always)]
fn places(layout: CodeLayout, group: usize) -> impl Iterator<Item = CodeBits> {
    let (low, high) = (layout.low, layout.high);
    let plane = move |bits: u32, first: u32| {
        let chunk = first as usize + group % bits as usize;
        CodeBits { chunk, shift: bits * (group as u32 / bits), bits, of_code: first }
    };
    std::iter::once(plane(low, 0)).chain((high > 0).then(|| plane(high, low)))
}
