//! The rows of one head in memory, and the sizes of attention.
use super::visible::Visible;
use crate::rows::{sum, vectorised};
use crate::{TensorReader, cpu, element::Element, parallel, product::RightOperand, real::Real};
use candle_core::{CpuStorage, DType, Layout, Result, bail};
use half::{bf16, f16};
use std::ops::Range;

/// Queries per block: their scores stay in a core's L2 cache.
pub(super) const BLOCK: usize = 64;

/// Keys per tile: what is packed of their rows stays in a core's L2 cache with the scores.
pub(super) const TILE: usize = 256;

/// Elements that are copied at once to see whether they are finite.
const FINITE: usize = 512;

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

/// How products of attention are computed.
#[derive(Debug, Clone, Copy)]
pub(super) struct ProductForm {
    /// Queries at once, where pairs that are not visible have a weight of zero and are multiplied by the inputs.
    pub(super) queries: usize,
    /// Whether both operands are rounded to bf16, and a number that is left over is paired with another one and a weight of zero.
    is_bf16: bool,
}

impl ProductForm {
    /// The form for these inputs.
    ///
    /// It is one query at once, which needs no weights of zero, if an input has NaN or infinity: times zero that is NaN, which would reach
    /// queries that do not see it.
    pub(super) fn of<T: Real>(visible: &Visible, inputs: &[&TensorReader<'_>]) -> Result<Self> {
        let is_ragged = |ranges: &[Range<usize>]| ranges.iter().any(|range| *range != ranges[0]);
        let is_bf16 = inputs.iter().any(|input| input.is_bf16());
        let has_zeros = is_bf16 || visible.lists().iter().any(|ranges| ranges.chunks(BLOCK).any(is_ragged));
        for input in inputs.iter().filter(|_| has_zeros) {
            if !input.is_finite::<T>()? {
                return Ok(Self { queries: 1, is_bf16: false });
            }
        }
        Ok(Self { queries: BLOCK, is_bf16 })
    }

    /// An operand without elements.
    pub(super) fn operand<T: Real>(self) -> RightOperand<T> {
        if self.is_bf16 { RightOperand::of_bf16() } else { RightOperand::new() }
    }
}

/// The rows of one head of `[batch, rows, heads, width]`, with any strides, in the compute dtype or as 16-bit floats.
pub(super) struct HeadRows<'a, T> {
    elements: HeadElements<'a, T>,
    start: usize,
    width: usize,
    strides: [usize; 2],
}

#[derive(Clone, Copy)]
enum HeadElements<'a, T> {
    Computed(&'a [T]),
    Bf16(&'a [bf16]),
    F16(&'a [f16]),
}

impl<'a, T: Real> HeadElements<'a, T> {
    fn of(storage: &'a CpuStorage) -> Result<Self> {
        Ok(match storage {
            CpuStorage::BF16(elements) => Self::Bf16(elements),
            CpuStorage::F16(elements) => Self::F16(elements),
            _ => Self::Computed(T::cpu_storage_as_slice(storage)?),
        })
    }

    /// Returns whether none of `len` elements from `start` on that are `step` apart is NaN or infinite.
    fn is_finite(self, start: usize, step: usize, len: usize) -> bool {
        let is_zero = |some: &[T]| sum(some, |v| v * T::zero()) == T::zero();
        match self {
            Self::Computed(from) if step == 1 => is_zero(&from[start..start + len]),
            _ => (0..len).step_by(FINITE).all(|at| {
                let mut some = [T::zero(); FINITE];
                let some = &mut some[..FINITE.min(len - at)];
                self.copy(start + at * step, step, some);
                is_zero(some)
            }),
        }
    }

    /// Writes `into.len()` elements from `start` on that are `step` apart.
    #[inline(always)]
    fn copy(self, start: usize, step: usize, into: &mut [T]) {
        match self {
            Self::Computed(from) if step == 1 => into.copy_from_slice(&from[start..start + into.len()]),
            Self::Computed(from) => copy(&from[start..], step, into, |x| x),
            Self::Bf16(from) => copy(&from[start..], step, into, |x| T::from_f64(x.load().into())),
            Self::F16(from) => copy(&from[start..], step, into, |x| T::from_f64(x.load().into())),
        }
    }
}

#[inline(always)]
fn copy<E: Copy, T>(from: &[E], step: usize, into: &mut [T], load: impl Fn(E) -> T) {
    match step {
        1 => into.iter_mut().zip(from).for_each(|(into, &x)| *into = load(x)),
        step => into.iter_mut().enumerate().for_each(|(i, into)| *into = load(from[i * step])),
    }
}

impl<'a, T: Real> HeadRows<'a, T> {
    fn new(storage: &'a CpuStorage, layout: &Layout, batch: usize, head: usize) -> Result<Self> {
        let &[of_batch, of_row, of_head, of_column] = layout.stride() else {
            bail!("flash_attn: expected four dims")
        };
        let start = layout.start_offset() + batch * of_batch + head * of_head;
        let elements = HeadElements::of(storage)?;
        Ok(Self { elements, start, width: layout.dims()[3], strides: [of_row, of_column] })
    }

    /// Packs rows as the right operand of products, or with `turned` as its columns.
    pub(super) fn pack(&self, rows: &Range<usize>, turned: bool, into: &mut RightOperand<T>) {
        let Self { elements, start, width, strides: [of_row, of_column] } = *self;
        let start = start + rows.start * of_row;
        let (dims, strides) = match turned {
            true => ([width, rows.len()], [of_column, of_row]),
            false => ([rows.len(), width], [of_row, of_column]),
        };
        match elements {
            HeadElements::Computed(from) => into.pack(&from[start..], dims, strides),
            HeadElements::Bf16(from) => into.pack_bf16(&from[start..], dims, strides),
            HeadElements::F16(_) => {
                let mut wide = vec![T::zero(); rows.len() * width];
                self.copy(rows.clone(), &mut wide);
                into.pack(&wide, dims, if turned { [1, width] } else { [width, 1] });
            }
        }
    }

    /// Copies rows one after the other.
    pub(super) fn copy(&self, rows: Range<usize>, into: &mut [T]) {
        let Self { elements, start, width, strides: [of_row, of_column] } = *self;
        vectorised(
            #[inline(always)]
            || {
                for (row, into) in rows.zip(into.chunks_exact_mut(width)) {
                    elements.copy(start + row * of_row, of_column, into);
                }
            },
        );
    }
}

impl TensorReader<'_> {
    /// Returns whether the elements are bf16.
    fn is_bf16(&self) -> bool {
        self.storage.dtype() == DType::BF16
    }

    /// Returns whether no element of `[batch, rows, heads, width]` is NaN or infinite.
    fn is_finite<T: Real>(&self) -> Result<bool> {
        let (&[batch, rows, heads, width], &[of_batch, of_row, of_head, step]) =
            (self.layout.dims(), self.layout.stride())
        else {
            bail!("flash_attn: expected four dims")
        };
        let elements = HeadElements::<T>::of(cpu(&self.storage)?)?;
        if let Some((start, end)) = self.layout.contiguous_offsets() {
            return Ok(elements.is_finite(start, 1, end - start));
        }
        let mut starts = (0..batch).flat_map(|b| {
            let of_batch = self.layout.start_offset() + b * of_batch;
            (0..heads).flat_map(move |h| (0..rows).map(move |row| of_batch + h * of_head + row * of_row))
        });
        Ok(starts.all(|start| elements.is_finite(start, step, width)))
    }

    /// Returns one head of `[batch, rows, heads, width]`.
    pub(super) fn head<T: Real>(&self, batch: usize, head: usize) -> Result<HeadRows<'_, T>> {
        HeadRows::new(cpu(&self.storage)?, self.layout, batch, head)
    }
}
