//! The product of sixteen rows of a weight with some rows of the input.

use super::format::{CHUNK, COLUMNS, CodeLayout, Format, GROUPS, ROWS, Scales};
use super::inputs::InputBlock;
use super::lanes::{Kernel, Lanes};
use std::marker::PhantomData;

/// How far ahead of their use weights are asked for: processors do not prefetch beyond a page of 4096 bytes.
const AHEAD: usize = 2048;

/// Rows of tiles by rows of inputs.
pub(super) struct TileProduct<'a, F> {
    /// The tiles of whole rows of tiles.
    pub(super) tiles: &'a [u8],
    /// The blocks of the input rows, one row after the other.
    pub(super) x: &'a [InputBlock],
    /// The tiles of 32 columns in a row.
    pub(super) width: usize,
    /// For each row of tiles and each input row, sixteen results.
    pub(super) out: &'a mut [[f32; ROWS]],
    pub(super) format: PhantomData<F>,
}

impl<F: Format> Kernel for TileProduct<'_, F> {
    #[inline(always)]
    fn run<L: Lanes>(self, lanes: L) {
        let Self { tiles, x, width, out, .. } = self;
        let row = width * COLUMNS / F::LAYOUT.columns * F::LAYOUT.block();
        let rows = x.len() / width;
        for (tiles, out) in tiles.chunks_exact(row).zip(out.chunks_exact_mut(rows)) {
            let mut rest = (x, out);
            if L::HAS_MANY {
                rest = several::<F, L, 8>(lanes, tiles, rest, width);
            }
            rest = several::<F, L, 4>(lanes, tiles, rest, width);
            several::<F, L, 1>(lanes, tiles, rest, width);
        }
    }
}

/// Multiplies a row of tiles with groups of `M` rows of inputs, which use its codes once they are unpacked, and returns the
/// rows that make no group.
#[inline(always)]
fn several<'a, 'o, F: Format, L: Lanes, const M: usize>(
    lanes: L,
    tiles: &[u8],
    (x, out): (&'a [InputBlock], &'o mut [[f32; ROWS]]),
    width: usize,
) -> (&'a [InputBlock], &'o mut [[f32; ROWS]]) {
    let (groups, rest) = out.as_chunks_mut::<M>();
    let (blocks, tail) = x.split_at(groups.len() * M * width);
    for (out, x) in groups.iter_mut().zip(blocks.chunks_exact(M * width)) {
        rows_of::<F, L, M>(lanes, tiles, x, width, out);
    }
    (tail, rest)
}

/// Multiplies a row of tiles with `M` rows of inputs.
#[inline(always)]
fn rows_of<F: Format, L: Lanes, const M: usize>(
    lanes: L,
    tiles: &[u8],
    x: &[InputBlock],
    width: usize,
    out: &mut [[f32; ROWS]; M],
) {
    const { assert!(F::LAYOUT.columns.is_multiple_of(COLUMNS)) };
    let layout = F::LAYOUT;
    let x: [&[InputBlock]; M] = std::array::from_fn(|r| &x[r * width..][..width]);
    let mut y = [lanes.zeros(); M];
    let per_block = layout.columns / COLUMNS;
    for (i, block) in tiles.chunks_exact(layout.block()).enumerate() {
        let (header, tiles) = block.split_at(layout.header());
        let scale = lanes.halves(part(header, 0));
        let minimum = if layout.has_minimum() { lanes.halves(part(header, 2 * ROWS)) } else { lanes.zeros() };
        for (j, tile) in tiles.chunks_exact(layout.tile()).enumerate() {
            let x: [&InputBlock; M] = std::array::from_fn(|r| &x[r][i * per_block + j]);
            for line in 0..layout.tile() / CHUNK {
                lanes.prefetch(tile.as_ptr().wrapping_add(AHEAD + line * CHUNK));
            }
            let (scales, planes) = tile.split_at(layout.scales_bytes());
            match layout.scales {
                Scales::Whole => {
                    let starts = std::array::from_fn(|r| -layout.zero * (x[r].sums[0] + x[r].sums[1]));
                    let sums = dots::<L, M, GROUPS>(lanes, layout, 0, planes, x, starts);
                    for r in 0..M {
                        y[r] = lanes.add(y[r], lanes.mul(sums[r], lanes.times(scale, x[r].scale)));
                        if layout.adds {
                            y[r] = lanes.add(y[r], lanes.times(minimum, x[r].total));
                        }
                    }
                }
                Scales::Of32 => {
                    let scale = lanes.mul(scale, lanes.unsigned(part(scales, 0)));
                    let lowest = lanes.mul(minimum, lanes.unsigned(part(scales, ROWS)));
                    let sums = dots::<L, M, GROUPS>(lanes, layout, 0, planes, x, [0; M]);
                    for r in 0..M {
                        y[r] = lanes.add(y[r], lanes.mul(sums[r], lanes.times(scale, x[r].scale)));
                        y[r] = lanes.sub(y[r], lanes.times(lowest, x[r].total));
                    }
                }
                Scales::Of16 | Scales::Pairs => {
                    for half in 0..2 {
                        let stored: &[u8; ROWS] = part(scales, half * ROWS);
                        let starts = std::array::from_fn(|r| -layout.zero * x[r].sums[half]);
                        let sums =
                            dots::<L, M, { GROUPS / 2 }>(lanes, layout, half * GROUPS / 2, planes, x, starts);
                        let own = match layout.scales {
                            Scales::Of16 => lanes.signed(stored),
                            _ => lanes.unsigned(&stored.map(|pair| pair & 15)),
                        };
                        let scale = lanes.mul(scale, own);
                        for r in 0..M {
                            y[r] = lanes.add(y[r], lanes.mul(sums[r], lanes.times(scale, x[r].scale)));
                        }
                        if layout.has_minimum() {
                            let lowest = lanes.mul(minimum, lanes.unsigned(&stored.map(|pair| pair >> 4)));
                            for r in 0..M {
                                let total = x[r].scale * x[r].sums[half] as f32;
                                y[r] = lanes.sub(y[r], lanes.times(lowest, total));
                            }
                        }
                    }
                }
            }
        }
    }
    for (y, out) in y.into_iter().zip(out) {
        lanes.store(y, out);
    }
}

/// Returns the sums of products over `N` groups from `first`, on top of `starts`.
#[inline(always)]
fn dots<L: Lanes, const M: usize, const N: usize>(
    lanes: L,
    layout: CodeLayout,
    first: usize,
    planes: &[u8],
    x: [&InputBlock; M],
    starts: [i32; M],
) -> [L::Floats; M] {
    let most = layout.most();
    let mut sums = [lanes.start(0); M];
    for r in 0..M {
        sums[r] = lanes.start(starts[r]);
    }
    for n in 0..N {
        let codes = codes(lanes, layout, planes, first + n);
        for r in 0..M {
            sums[r] = lanes.dot(sums[r], codes, x[r].words[first + n], most);
            if (n + 1) % lanes.room(most) == 0 || n + 1 == N {
                sums[r] = lanes.settle(sums[r]);
            }
        }
    }
    let mut floats = [lanes.zeros(); M];
    for r in 0..M {
        floats[r] = lanes.floats(sums[r]);
    }
    floats
}

/// Returns the codes of a group of four columns.
#[inline(always)]
pub(super) fn codes<L: Lanes>(lanes: L, layout: CodeLayout, planes: &[u8], group: usize) -> L::Codes {
    let low = bits(lanes, planes, group, [0, layout.low, 0]);
    match layout.high {
        0 => low,
        high => lanes.or(low, bits(lanes, planes, group, [layout.low, high, layout.low])),
    }
}

/// Returns the bits of a group in the plane of `bits` bits that begins with chunk `first`, moved to bit `to`.
#[inline(always)]
fn bits<L: Lanes>(lanes: L, planes: &[u8], group: usize, [first, bits, to]: [u32; 3]) -> L::Codes {
    let chunk = part(planes, (first as usize + group % bits as usize) * CHUNK);
    let from = bits * (group as u32 / bits);
    lanes.bits(chunk, from as i32 - to as i32, (((1u32 << bits) - 1) << to) as u8)
}

/// Returns the bytes from `at`.
#[inline(always)]
pub(super) fn part<const N: usize>(bytes: &[u8], at: usize) -> &[u8; N] {
    match bytes[at..].first_chunk() {
        Some(part) => part,
        None => panic!("a part outside of a tile"), // no layout has one
    }
}
