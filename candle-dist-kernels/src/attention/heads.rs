//! The rows of one head in memory, and the sizes of attention.
use super::visible::Visible;
use crate::{TensorReader, cpu, parallel, real::Real, rows::sum};
use candle_core::{CpuStorage, Layout, Result, bail};
use std::ops::Range;

/// Queries per block: their scores stay in a core's L2 cache.
const BLOCK: usize = 64;

/// The number of multiplications from which the batch is distributed over threads.
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

    /// The key head of a query head.
    pub(super) fn key_head(&self, head: usize) -> usize {
        head / (self.heads / self.kv_heads)
    }

    /// Returns blocks of `size` queries.
    pub(super) fn blocks(&self, size: usize) -> impl Iterator<Item = Range<usize>> {
        let queries = self.queries;
        (0..queries).step_by(size).map(move |start| start..(start + size).min(queries))
    }

    /// Calls `run` for each element of the batch, on several threads if that is faster.
    pub(super) fn each<R: Send>(&self, run: impl Fn(usize) -> Result<R> + Sync) -> Result<Vec<R>> {
        parallel::map(self.is_shared_work(), 0..self.batch, |_, b| run(b)).into_iter().collect()
    }
}

impl AttentionSizes {
    /// Calls `run` for each element of the batch with its parts of two lists, on several threads if that is faster.
    pub(super) fn each_with<T: Send>(
        &self,
        [a, b]: [&mut [T]; 2],
        run: impl Fn(usize, [&mut [T]; 2]) -> Result<()> + Sync,
    ) -> Result<()> {
        let [len_a, len_b] = [a.len(), b.len()].map(|len| (len / self.batch).max(1));
        let parts = a.chunks_mut(len_a).zip(b.chunks_mut(len_b));
        parallel::map(self.is_shared_work(), parts, |i, (a, b)| run(i, [a, b])).into_iter().collect()
    }

    /// Whether the batch is worth several threads.
    fn is_shared_work(&self) -> bool {
        self.batch * self.heads * self.queries * self.keys * (self.dim + self.width) >= PARALLEL
    }
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
pub(super) struct HeadRows<'a> {
    pub(super) storage: &'a CpuStorage,
    start: usize,
    width: usize,
    strides: [usize; 2],
}

impl<'a> HeadRows<'a> {
    pub(super) fn new(storage: &'a CpuStorage, layout: &Layout, batch: usize, head: usize) -> Result<Self> {
        let &[of_batch, of_row, of_head, of_column] = layout.stride() else {
            bail!("flash_attn: expected four dims")
        };
        let start = layout.start_offset() + batch * of_batch + head * of_head;
        Ok(Self { storage, start, width: layout.dims()[3], strides: [of_row, of_column] })
    }

    pub(super) fn rows(&self, rows: Range<usize>) -> Layout {
        let start = self.start + rows.start * self.strides[0];
        Layout::new((rows.len(), self.width).into(), self.strides.to_vec(), start)
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
            let head = self.head(b, h)?;
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
    pub(super) fn head(&self, batch: usize, head: usize) -> Result<HeadRows<'_>> {
        HeadRows::new(cpu(&self.storage)?, self.layout, batch, head)
    }
}

/// Applies `put` to rows of one head of `out`, which begin at `first` and follow each other after `step` elements, and
/// to the rows of `part`.
pub(super) fn into_head<T: Real>(
    out: &mut [T],
    part: &[T],
    (first, step, width): (usize, usize, usize),
    put: fn(&mut [T], &[T]),
) {
    let rows = out[first..].chunks_mut(step).zip(part.chunks_exact(width));
    rows.for_each(|(out, part)| put(&mut out[..width], part));
}
