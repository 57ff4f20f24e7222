//! The floats that tiles stand for, and products with the floats of a weight.
//!
//! Products make the floats of a panel of the weight at a time, in a core's cache, and forget them.

use std::marker::PhantomData;
use std::ops::Range;

use candle_core::Result;
use candle_core::quantized::GgmlDType;

use super::format::{COLUMNS, Format, GROUPS, ROWS, Scales, with_format};
use super::kernel::{codes, part};
use super::lanes::{Kernel, Lanes};
use super::portable::PortableLanes;
use super::tiles::{Processor, Tiles};
use crate::parallel;
use crate::product::{Matrix, by_columns};

/// The most rows or columns of the result that one thread computes at once, and of the weight that it multiplies at once: the
/// floats of a panel of both lie in the L2 cache of a core.
const PANEL: usize = 256;

/// Multiplications from which several threads share a product, and floats from which they make them.
const PARALLEL: usize = 1 << 20;
const PARALLEL_FLOATS: usize = 1 << 16;

/// Tiles that become floats.
struct TileFloats<'a, F> {
    /// Whole rows of tiles.
    rows: &'a [u8],
    /// The tiles of a row, and those of them that are wanted.
    width: usize,
    wanted: Range<usize>,
    /// For each column of the wanted tiles, a float of each row; a column begins so many floats behind the one before.
    out: &'a mut [f32],
    stride: usize,
    format: PhantomData<F>,
}

impl<F: Format> Kernel for TileFloats<'_, F> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { rows, width, wanted, out, stride, .. } = self;
        let layout = F::LAYOUT;
        let per_block = layout.columns / COLUMNS;
        let row_bytes = width / per_block * layout.block();
        for (r, row) in rows.chunks_exact(row_bytes).enumerate() {
            for (at, tile) in wanted.clone().enumerate() {
                let block = &row[tile / per_block * layout.block()..][..layout.block()];
                let (header, tiles) = block.split_at(layout.header());
                let tile = &tiles[tile % per_block * layout.tile()..][..layout.tile()];
                let out = &mut out[at * COLUMNS * stride + r * ROWS..];
                tile_floats::<F, L>(lanes, [header, tile], out, stride);
            }
        }
    }
}

/// Writes the floats of a tile with the header of its block, one operation after the other, as candle computes them.
#[inline(always)]
fn tile_floats<F: Format, L: Lanes>(lanes: L, [header, tile]: [&[u8]; 2], out: &mut [f32], stride: usize) {
    let layout = F::LAYOUT;
    let scale = lanes.halves(part(header, 0));
    let minimum = if layout.has_minimum() { lanes.halves(part(header, 2 * ROWS)) } else { lanes.zeros() };
    let (stored, planes) = tile.split_at(layout.scales_bytes());
    // Of the first and the last 16 columns.
    let (mut scales, mut minimums) = ([scale; 2], [minimum; 2]);
    for half in 0..2 {
        match layout.scales {
            Scales::Whole => {}
            Scales::Of32 => {
                scales[half] = lanes.mul(scale, lanes.unsigned(part(stored, 0)));
                minimums[half] = lanes.mul(minimum, lanes.unsigned(part(stored, ROWS)));
            }
            Scales::Of16 => scales[half] = lanes.mul(scale, lanes.signed(part(stored, half * ROWS))),
            Scales::Pairs => {
                let pairs: &[u8; ROWS] = part(stored, half * ROWS);
                scales[half] = lanes.mul(scale, lanes.unsigned(&pairs.map(|pair| pair & 15)));
                minimums[half] = lanes.mul(minimum, lanes.unsigned(&pairs.map(|pair| pair >> 4)));
            }
        }
    }
    for group in 0..GROUPS {
        let (codes, half) = (codes(lanes, layout, planes, group), group / (GROUPS / 2));
        for column in 0..4 {
            let product = lanes.mul(lanes.column(codes, column as i32, layout.zero), scales[half]);
            let float = match layout.has_minimum() {
                false => product,
                true if layout.adds => lanes.add(product, minimums[half]),
                true => lanes.sub(product, minimums[half]),
            };
            if let Some(out) = out[(4 * group + column) * stride..].first_chunk_mut() {
                lanes.store(float, out);
            }
        }
    }
}

/// Cuts so many rows or columns, of which `unit` stay together, into parts for the threads, none larger than a panel.
fn parts(count: usize, unit: usize, threads: usize) -> Vec<usize> {
    let units = count.div_ceil(unit);
    let parts = count.div_ceil(PANEL).next_multiple_of(threads).min(units);
    let end = |part: usize| (units * part / parts * unit).min(count);
    (0..parts).map(|part| end(part + 1) - end(part)).collect()
}

impl Tiles {
    /// Writes the floats of some tiles of some rows of tiles. Each column of `out` has one of each row, and begins `stride` behind the one
    /// before.
    pub(super) fn floats(
        &self,
        processor: Processor,
        [rows, wanted]: [Range<usize>; 2],
        out: &mut [f32],
        stride: usize,
    ) {
        let rows = &self.tiles()[rows.start * self.row_bytes()..rows.end * self.row_bytes()];
        let width = self.columns / COLUMNS;
        with_format!(self.dtype, F => {
            let tiles = TileFloats { rows, width, wanted, out, stride, format: PhantomData::<F> };
            match processor {
                #[cfg(all(target_arch = "x86_64", feature = "avx512"))]
                Processor::Avx512(lanes) => lanes.run(tiles),
                #[cfg(target_arch = "x86_64")]
                Processor::Avx2(lanes) => lanes.run(tiles),
                Processor::Portable => PortableLanes.run(tiles),
            }
        });
    }

    /// Returns all floats `[rows, columns]`.
    pub(super) fn dequantize(&self) -> Vec<f32> {
        let (processor, columns) = (Processor::best(), self.columns);
        let mut out = vec![0.0; self.rows * columns];
        let is_shared = out.len() >= PARALLEL_FLOATS;
        parallel::map(is_shared, out.chunks_mut(ROWS * columns), |row, out| {
            let mut floats = vec![0.0; ROWS * columns];
            self.floats(processor, [row..row + 1, 0..columns / COLUMNS], &mut floats, ROWS);
            for (r, out) in out.chunks_exact_mut(columns).enumerate() {
                out.iter_mut().zip(floats.chunks_exact(ROWS)).for_each(|(out, column)| *out = column[r]);
            }
        });
        out
    }
}

impl FloatPanels for Tiles {
    fn units(&self) -> [usize; 2] {
        [ROWS, COLUMNS]
    }

    fn dims(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    fn strides(&self, [rows, _]: [usize; 2]) -> [usize; 2] {
        // No power of two, whose multiples have few places in a cache.
        [1, rows.next_multiple_of(ROWS) | ROWS]
    }

    fn write(&self, [rows, columns]: [Range<usize>; 2], out: &mut [f32], strides: [usize; 2]) {
        let tiles =
            [rows.start / ROWS..rows.end.div_ceil(ROWS), columns.start / COLUMNS..columns.end / COLUMNS];
        self.floats(Processor::best(), tiles, out, strides[1]);
    }
}

/// A weight whose floats are made a panel at a time.
pub(super) trait FloatPanels: Sync {
    /// The rows and the columns that stay together.
    fn units(&self) -> [usize; 2];

    /// The rows and the columns.
    fn dims(&self) -> [usize; 2];

    /// Returns how far apart the floats of two rows, and of two columns, of a panel of this size are; one of both is 1.
    fn strides(&self, panel: [usize; 2]) -> [usize; 2];

    /// Writes the floats of rows and columns that begin and end between units.
    fn write(&self, panel: [Range<usize>; 2], out: &mut [f32], strides: [usize; 2]);
}

/// Returns memory for a panel, and the strides in it.
fn panel_memory(weight: &dyn FloatPanels, [rows, columns]: [usize; 2]) -> (Vec<f32>, [usize; 2]) {
    let strides = weight.strides([rows, columns]);
    let count = if strides[0] == 1 { columns * strides[1] } else { rows * strides[0] };
    (vec![0.0; count], strides)
}

/// Returns the product `[m, rows]` of `x` `[m, columns]` and the transpose of the floats of a weight.
pub(super) fn float_product(weight: &dyn FloatPanels, x: &[f32], m: usize) -> Result<Vec<f32>> {
    let [n, k] = weight.dims();
    let is_shared = m * n * k >= PARALLEL;
    let widths = parts(n, weight.units()[0], if is_shared { parallel::threads() } else { 1 });
    by_columns::<f32>(m, &widths, is_shared, |number, out| {
        let first: usize = widths[..number].iter().sum();
        let rows = widths[number];
        let (mut floats, [of_row, of_column]) = panel_memory(weight, [rows, PANEL.min(k)]);
        for start in (0..k).step_by(PANEL) {
            let inner = PANEL.min(k - start);
            weight.write([first..first + rows, start..start + inner], &mut floats, [of_row, of_column]);
            let x = Matrix::new(&x[start..], [m, inner], [k, 1])?;
            out.add_product(x, Matrix::new(&floats, [inner, rows], [of_column, of_row])?)?;
        }
        Ok(())
    })
}

/// Returns the product `[m, columns]` of `y` `[m, rows]`, whose rows begin `apart` from another, and the floats of a weight.
pub(super) fn float_gradient(
    weight: &dyn FloatPanels,
    y: &[f32],
    apart: usize,
    m: usize,
) -> Result<Vec<f32>> {
    let [n, k] = weight.dims();
    let is_shared = m * n * k >= PARALLEL;
    let widths = parts(k, weight.units()[1], if is_shared { parallel::threads() } else { 1 });
    by_columns::<f32>(m, &widths, is_shared, |number, out| {
        let first: usize = widths[..number].iter().sum();
        let columns = widths[number];
        let (mut floats, strides) = panel_memory(weight, [PANEL.min(n), columns]);
        for start in (0..n).step_by(PANEL) {
            let inner = PANEL.min(n - start);
            weight.write([start..start + inner, first..first + columns], &mut floats, strides);
            let y = Matrix::new(&y[start..], [m, inner], [apart, 1])?;
            out.add_product(y, Matrix::new(&floats, [inner, columns], strides)?)?;
        }
        Ok(())
    })
}
