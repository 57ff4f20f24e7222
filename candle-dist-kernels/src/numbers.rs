//! Tensors of floats of any width, which one loop reads and writes in a compute type.
use candle_core::{CpuStorage, Layout, Result, Tensor, bail};
use half::{bf16, f16};

use super::element::{Element, change_storage};
use super::real::Real;
use super::{TensorReader, cpu};

/// Elements that are read.
pub(super) enum NumbersRef<'a, R> {
    Real(&'a [R]),
    F16(&'a [f16]),
    BF16(&'a [bf16]),
}

/// Elements that are changed in place.
pub(super) enum Numbers<'a, R> {
    Real(&'a mut [R]),
    F16(&'a mut [f16]),
    BF16(&'a mut [bf16]),
}

/// Returns a 16-bit number in the compute type, which has at least 32 bits.
#[inline(always)]
fn wide<R: Real, E: Element<Real = f32>>(x: E) -> R {
    R::from_f64(f64::from(x.load()))
}

#[inline(always)]
fn narrow<R: Real, E: Element<Real = f32>>(x: R) -> E {
    E::store(x.to_f64() as f32)
}

#[inline(always)]
fn widen<R: Real, E: Element<Real = f32>>(all: &[E], room: &mut [R]) {
    room.iter_mut().zip(all).for_each(|(to, &x)| *to = wide(x));
}

#[inline(always)]
fn round<R: Real, E: Element<Real = f32>>(all: &mut [E], values: &[R]) {
    all.iter_mut().zip(values).for_each(|(to, &x)| *to = narrow(x));
}

/// Sets each value that does not round to its element to that element.
#[inline(always)]
fn follow<R: Real, E: Element<Real = f32>>(all: &[E], values: &mut [R]) {
    for (value, &x) in values.iter_mut().zip(all) {
        let rounded: E = narrow(*value);
        *value = if rounded == x { *value } else { wide(x) };
    }
}

impl<'a, R: Real + Element<Real = R>> NumbersRef<'a, R> {
    /// Returns the elements of a contiguous CPU tensor.
    pub(super) fn of(reading: &'a TensorReader<'_>) -> Result<Self> {
        Ok(match cpu(&reading.storage)? {
            CpuStorage::F16(_) => Self::F16(reading.elements()?),
            CpuStorage::BF16(_) => Self::BF16(reading.elements()?),
            _ => Self::Real(reading.elements()?),
        })
    }

    /// Returns the elements `start..start + len`.
    pub(super) fn part(&self, start: usize, len: usize) -> Self {
        match self {
            Self::Real(all) => Self::Real(&all[start..start + len]),
            Self::F16(all) => Self::F16(&all[start..start + len]),
            Self::BF16(all) => Self::BF16(&all[start..start + len]),
        }
    }

    /// Returns `room.len()` elements from `start` on; in `room` if they are converted.
    #[inline(always)]
    pub(super) fn read<'b>(&'b self, start: usize, room: &'b mut [R]) -> &'b [R] {
        match self {
            Self::Real(all) => return &all[start..start + room.len()],
            Self::F16(all) => widen(&all[start..], room),
            Self::BF16(all) => widen(&all[start..], room),
        }
        room
    }
}

impl<R: Real + Element<Real = R>> Numbers<'_, R> {
    /// Removes and returns the first `len` elements.
    pub(super) fn take(&mut self, len: usize) -> Self {
        fn cut<'a, T>(all: &mut &'a mut [T], len: usize) -> &'a mut [T] {
            let (first, rest) = std::mem::take(all).split_at_mut(len);
            *all = rest;
            first
        }
        match self {
            Self::Real(all) => Self::Real(cut(all, len)),
            Self::F16(all) => Self::F16(cut(all, len)),
            Self::BF16(all) => Self::BF16(cut(all, len)),
        }
    }

    /// Returns `room.len()` elements from `start` on, to be changed. Those that are converted are in `room`;
    /// [`settle`](Self::settle) takes them back.
    #[inline(always)]
    pub(super) fn lend<'b>(&'b mut self, start: usize, room: &'b mut [R]) -> &'b mut [R] {
        match self {
            Self::Real(all) => return &mut all[start..start + room.len()],
            Self::F16(all) => widen(&all[start..], room),
            Self::BF16(all) => widen(&all[start..], room),
        }
        room
    }

    /// Rounds the elements in `room` that [`lend`](Self::lend) has converted.
    #[inline(always)]
    pub(super) fn settle(&mut self, start: usize, room: &[R]) {
        if !matches!(self, Self::Real(_)) {
            self.set(start, room);
        }
    }

    /// Sets the elements from `start` on to these values, rounded.
    #[inline(always)]
    pub(super) fn set(&mut self, start: usize, values: &[R]) {
        match self {
            Self::Real(all) => all[start..start + values.len()].copy_from_slice(values),
            Self::F16(all) => round(&mut all[start..], values),
            Self::BF16(all) => round(&mut all[start..], values),
        }
    }

    /// Sets each of the values that is not the wider copy of its element to that element.
    #[inline(always)]
    pub(super) fn lead(&self, start: usize, values: &mut [R]) {
        match self {
            Self::Real(all) => values.copy_from_slice(&all[start..start + values.len()]),
            Self::F16(all) => follow(&all[start..], values),
            Self::BF16(all) => follow(&all[start..], values),
        }
    }
}

/// Runs `f` on the mutable elements of contiguous CPU tensors that are not empty, each with its own memory.
pub(super) fn change_numbers<R: Real + Element<Real = R>>(
    tensors: &[&Tensor],
    held: Vec<Numbers<'_, R>>,
    f: &mut dyn FnMut(Vec<Numbers<'_, R>>) -> Result<()>,
) -> Result<()> {
    let [first, rest @ ..] = tensors else { return f(held) };
    let mut held = Some(held);
    change_storage(first, &mut |storage, layout| {
        let mut held: Vec<Numbers<'_, R>> = held.take().unwrap_or_default(); // no longer than `storage`
        held.push(numbers(storage, layout)?);
        change_numbers(rest, held, f)
    })
}

fn numbers<'a, R: Real + Element<Real = R>>(
    storage: &'a mut CpuStorage,
    layout: &Layout,
) -> Result<Numbers<'a, R>> {
    let Some((start, end)) = layout.contiguous_offsets() else { bail!("step: expected contiguous tensors") };
    Ok(match storage {
        CpuStorage::F16(all) => Numbers::F16(&mut all[start..end]),
        CpuStorage::BF16(all) => Numbers::BF16(&mut all[start..end]),
        other => Numbers::Real(&mut R::slice_mut(other)?[start..end]),
    })
}
