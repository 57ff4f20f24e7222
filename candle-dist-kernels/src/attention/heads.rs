//! The rows of one head in memory, and the sizes of attention.
use super::visible::Visible;
use crate::{TensorReader, cpu, parallel, product::RightOperand, real::Real, rows::sum};
use candle_core::{Layout, Result, bail};
use std::ops::Range;

/// Queries per block: their scores stay in a core's L2 cache.
pub(super) const BLOCK: usize = 64;

/// Keys per tile: what is packed of their rows stays in a core's L2 cache with the scores.
pub(super) const TILE: usize = 256;

/// The number of multiplications from which the work is distributed over threads.
const PARALLEL: usize = 1 << 20;

/// The sizes of a query `[batch, q, heads, dim]`, a key `[batch, k, kv_heads, dim]` and a value `[batch, k, kv_heads,
/// width]`.
#[derive(Debug, Clone, Copy)]
pub struct AttentionSizes {
    pub(super) batch: usize,
    pub(super) queries: usize,
    pub(super) keys: usize,
    pub(super) heads: usize,
    pub(super) kv_heads: usize,
    pub(super) dim: usize,
    pub(super) width: usize,
}

impl AttentionSizes {
    pub(crate) fn of(query: &[usize], key: &[usize], value: &[usize]) -> Option<Self> {
        let (&[batch, queries, heads, dim], &[kb, keys, kv_heads, kd], &[vb, vk, vg, width]) =
            (query, key, value)
        else {
            return None;
        };
        let groups = if kv_heads == 0 { heads == 0 } else { heads.is_multiple_of(kv_heads) };
        let fits = groups && (batch, batch, dim, keys, kv_heads) == (kb, vb, kd, vk, vg);
        fits.then_some(Self { batch, queries, keys, heads, kv_heads, dim, width })
    }

    pub(crate) fn is_empty(&self) -> bool {
        [self.batch, self.queries, self.keys, self.heads, self.dim, self.width].contains(&0)
    }

    /// The number of rows of the result, over all heads.
    pub(super) fn rows(&self) -> usize {
        self.batch * self.queries * self.heads
    }

    /// The query heads that a key head serves.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }

    /// Returns the work on each key head of each element of the batch, with `rows` rows cut into pieces of `size`.
    pub(super) fn pieces(&self, rows: usize, size: usize) -> Vec<HeadPiece> {
        let heads = (0..self.batch).flat_map(|batch| (0..self.kv_heads).map(move |kv_head| (batch, kv_head)));
        heads
            .flat_map(|(batch, kv_head)| {
                blocks(0..rows, size).map(move |rows| HeadPiece { batch, kv_head, rows })
            })
            .collect()
    }

    /// Calls `run` for each piece with what belongs to it, on several threads if that is faster.
    pub(super) fn each<P: Send, R: Send>(
        &self,
        pieces: impl Iterator<Item = P>,
        run: impl Fn(P) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        parallel::map(self.is_shared_work(), pieces, |_, piece| run(piece)).into_iter().collect()
    }

    /// Whether the work is worth several threads.
    fn is_shared_work(&self) -> bool {
        self.batch * self.heads * self.queries * self.keys * (self.dim + self.width) >= PARALLEL
    }
}

/// Some rows of one key head of an element of the batch: queries of all heads that it serves, or keys.
#[derive(Debug, Clone)]
pub(super) struct HeadPiece {
    pub(super) batch: usize,
    pub(super) kv_head: usize,
    pub(super) rows: Range<usize>,
}

impl HeadPiece {
    /// Gives each piece its rows of `[batch, rows, kv_heads, width]`, of which `width` is not 0. The rows of a key head are
    /// cut into `pieces` of `size` rows.
    pub(super) fn cut<T>(
        all: &mut [T],
        [rows, kv_heads, width]: [usize; 3],
        [pieces, size]: [usize; 2],
    ) -> Vec<Vec<&mut [T]>> {
        let count = (all.len() / width).checked_div(rows * kv_heads).unwrap_or(0) * kv_heads * pieces;
        let mut cut: Vec<Vec<_>> = (0..count).map(|_| Vec::with_capacity(size.min(rows))).collect();
        for (at, row) in all.chunks_exact_mut(width).enumerate() {
            let (index, kv_head) = (at / kv_heads, at % kv_heads);
            let (batch, index) = (index / rows, index % rows);
            cut[(batch * kv_heads + kv_head) * pieces + index / size].push(row);
        }
        cut
    }
}

/// Cuts rows into blocks of `size`.
pub(super) fn blocks(rows: Range<usize>, size: usize) -> impl Iterator<Item = Range<usize>> {
    let end = rows.end;
    rows.step_by(size).map(move |start| start..(start + size).min(end))
}

/// Returns how many queries are computed at once, where pairs that are not visible have a weight of zero and are
/// multiplied by `inputs`.
///
/// It is one query, which needs no such pairs, if an input has NaN or infinity: times zero that is NaN, which would reach
/// queries that do not see it.
pub(super) fn queries_at_once<T: Real>(visible: &Visible, inputs: &[&TensorReader<'_>]) -> Result<usize> {
    let is_ragged = |ranges: &[Range<usize>]| ranges.iter().any(|range| *range != ranges[0]);
    if !visible.lists().iter().any(|ranges| ranges.chunks(BLOCK).any(is_ragged)) {
        return Ok(BLOCK);
    }
    for input in inputs {
        if !input.is_finite::<T>()? {
            return Ok(1);
        }
    }
    Ok(BLOCK)
}

/// The rows of one head of `[batch, rows, heads, width]`, with any strides.
pub(super) struct HeadRows<'a, T> {
    elements: &'a [T],
    start: usize,
    width: usize,
    strides: [usize; 2],
}

impl<'a, T: Real> HeadRows<'a, T> {
    fn new(elements: &'a [T], layout: &Layout, batch: usize, head: usize) -> Result<Self> {
        let &[of_batch, of_row, of_head, of_column] = layout.stride() else {
            bail!("flash_attn: expected four dims")
        };
        let start = layout.start_offset() + batch * of_batch + head * of_head;
        Ok(Self { elements, start, width: layout.dims()[3], strides: [of_row, of_column] })
    }

    /// Packs rows as the right operand of products, or with `turned` as its columns.
    pub(super) fn pack(&self, rows: &Range<usize>, turned: bool, into: &mut RightOperand<T>) {
        let Self { elements, start, width, strides: [of_row, of_column] } = *self;
        let from = &elements[start + rows.start * of_row..];
        match turned {
            true => into.pack(from, [width, rows.len()], [of_column, of_row]),
            false => into.pack(from, [rows.len(), width], [of_row, of_column]),
        }
    }

    /// Copies rows one after the other.
    pub(super) fn copy(&self, rows: Range<usize>, into: &mut [T]) {
        let Self { elements, start, width, strides: [of_row, of_column] } = *self;
        for (row, into) in rows.zip(into.chunks_exact_mut(width)) {
            let from = &elements[start + row * of_row..];
            match of_column {
                1 => into.copy_from_slice(&from[..width]),
                step => into.iter_mut().enumerate().for_each(|(i, into)| *into = from[i * step]),
            }
        }
    }
}

impl TensorReader<'_> {
    /// Returns whether no element of `[batch, rows, heads, width]` is NaN or infinite.
    fn is_finite<T: Real>(&self) -> Result<bool> {
        let elements = T::cpu_storage_as_slice(cpu(&self.storage)?)?;
        let is_zero = |part: &[T]| sum(part, |v| v * T::zero()) == T::zero();
        if let Some((start, end)) = self.layout.contiguous_offsets() {
            return Ok(is_zero(&elements[start..end]));
        }
        let (&[batch, rows, heads, width], &[.., step]) = (self.layout.dims(), self.layout.stride()) else {
            bail!("flash_attn: expected four dims")
        };
        let each = (0..batch).flat_map(|b| (0..heads).map(move |h| (b, h)));
        for (b, h) in each.filter(|_| width > 0) {
            let head = self.head::<T>(b, h)?;
            let is_finite = |row: usize| {
                let start = head.start + row * head.strides[0];
                match step {
                    1 => is_zero(&elements[start..start + width]),
                    _ => (0..width).all(|i| elements[start + i * step] * T::zero() == T::zero()),
                }
            };
            if !(0..rows).all(is_finite) {
                return Ok(false);
            }
        }
        Ok(true)
    }

    /// Returns one head of `[batch, rows, heads, width]`.
    pub(super) fn head<T: Real>(&self, batch: usize, head: usize) -> Result<HeadRows<'_, T>> {
        HeadRows::new(T::cpu_storage_as_slice(cpu(&self.storage)?)?, self.layout, batch, head)
    }
}
