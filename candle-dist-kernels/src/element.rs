//! Storage types of elements, conversions to their compute types, and changes in place.

use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, Error, InplaceOp1, Layout, Result, Tensor, WithDType, bail};
use half::{bf16, f16};
use std::cell::RefCell;

use super::real::Real;

/// A float storage type.
pub(super) trait Element: WithDType {
    /// The compute type: f32 for 16-bit floats.
    type Real: Real + Element<Real = Self::Real>;

    fn load(self) -> Self::Real;

    fn store(value: Self::Real) -> Self;

    fn slice_mut(storage: &mut CpuStorage) -> Result<&mut [Self]>;
}

macro_rules! element {
    ($float:ty, $dtype:ident, $real:ty, $load:expr, $store:expr) => {
        impl Element for $float {
            type Real = $real;

            #[inline(always)]
            fn load(self) -> $real {
                $load(self)
            }

            #[inline(always)]
            fn store(value: $real) -> Self {
                $store(value)
            }

            fn slice_mut(storage: &mut CpuStorage) -> Result<&mut [Self]> {
                match storage {
                    CpuStorage::$dtype(data) => Ok(data),
                    other => bail!("{:?} where {} is changed in place", other.dtype(), stringify!($dtype)),
                }
            }
        }
    };
}

element!(f32, F32, f32, |x| x, |x| x);
element!(f64, F64, f64, |x| x, |x| x);
element!(f16, F16, f32, widen_f16, narrow_f16);
element!(bf16, BF16, f32, |x: bf16| f32::from_bits(u32::from(x.to_bits()) << 16), narrow_bf16);

/// Converts exactly, in steps that the compiler vectorizes; the conversion of `half` checks the processor's features
/// each time.
#[inline(always)]
fn widen_f16(x: f16) -> f32 {
    const INFINITE: u32 = 0x7c00;
    /// 2¹¹²: corrects the exponent bias when 5-bit exponents are shifted to the place of 8-bit ones.
    const SCALE: f32 = f32::from_bits((127 + 112) << 23);
    let bits = u32::from(x.to_bits());
    let (sign, rest) = (bits & 0x8000, bits & 0x7fff);
    let finite = (f32::from_bits(rest << 13) * SCALE).to_bits();
    let magnitude = if rest >= INFINITE { 0x7f80_0000 | (rest & 0x3ff) << 13 } else { finite };
    f32::from_bits(magnitude | sign << 16)
}

/// Rounds to the nearest number, ties to even, in steps that the compiler vectorizes.
#[inline(always)]
pub(super) fn narrow_bf16(x: f32) -> bf16 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + (bits >> 16 & 1)) >> 16;
    // Rounding the bits of a NaN up would make a number of it.
    let nan = bits >> 16 | 0x40;
    bf16::from_bits(if bits & 0x7fff_ffff > f32::INFINITY.to_bits() { nan } else { rounded } as u16)
}

/// Rounds to the nearest number, ties to even, in steps that the compiler vectorizes.
#[inline(always)]
fn narrow_f16(x: f32) -> f16 {
    /// 2¹⁶, from which on magnitudes are infinite; rounding up makes some smaller ones infinite too.
    const INFINITE: u32 = (127 + 16) << 23;
    /// The smallest normal magnitude.
    const NORMAL: u32 = (127 - 14) << 23;
    /// Its last mantissa bit is the smallest subnormal number, 2⁻²⁴, so that adding it rounds to a multiple of that.
    const STEP: f32 = f32::from_bits((127 - 24 + 23) << 23);
    let bits = x.to_bits();
    let (sign, magnitude) = (bits >> 16 & 0x8000, bits & 0x7fff_ffff);
    let subnormal = (f32::from_bits(magnitude) + STEP).to_bits().wrapping_sub(STEP.to_bits());
    let is_odd = magnitude >> 13 & 1;
    let normal = magnitude.wrapping_sub((127 - 15) << 23).wrapping_add(0xfff + is_odd) >> 13;
    let nan = 0x7e00 | magnitude >> 13 & 0x3ff;
    let large = if magnitude > f32::INFINITY.to_bits() { nan } else { 0x7c00 };
    let finite = if magnitude < NORMAL { subnormal } else { normal };
    f16::from_bits((sign | if magnitude >= INFINITE { large } else { finite }) as u16)
}

/// Evaluates an expression with a name for the element type of a float dtype; an error of `op` for other dtypes.
macro_rules! with_element {
    ($op:expr, $dtype:expr, $element:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $element = f32;
                $body
            }
            candle_core::DType::F64 => {
                type $element = f64;
                $body
            }
            candle_core::DType::F16 => {
                type $element = half::f16;
                $body
            }
            candle_core::DType::BF16 => {
                type $element = half::bf16;
                $body
            }
            dtype => Err(candle_core::Error::UnsupportedDTypeForOp(dtype, $op).bt()),
        }
    };
}
pub(super) use with_element;

/// Runs `f` on the mutable elements of a contiguous CPU tensor, even if it is a variable.
pub(super) fn change<E: Element>(tensor: &Tensor, f: impl FnOnce(&mut [E]) -> Result<()>) -> Result<()> {
    if tensor.elem_count() == 0 {
        return f(&mut []); // candle mistakes it for a view that repeats elements
    }
    change_memory(tensor, |memory, layout| {
        let (start, end) =
            layout.contiguous_offsets().ok_or(Error::RequiresContiguous { op: "change in place" })?;
        f(&mut memory[start..end])
    })
}

/// Like [`change`] for a CPU tensor with any strides; `f` gets all of its memory.
pub(super) fn change_memory<E: Element>(
    tensor: &Tensor,
    f: impl FnOnce(&mut [E], &Layout) -> Result<()>,
) -> Result<()> {
    let mut f = Some(f);
    change_storage(tensor, &mut |storage, layout| {
        let memory = E::slice_mut(storage)?;
        f.take().map_or(Ok(()), |f| f(memory, layout))
    })
}

/// Runs `f` on the storage of a CPU tensor, even if it is a variable.
pub(super) fn change_storage(
    tensor: &Tensor,
    f: &mut dyn FnMut(&mut CpuStorage, &Layout) -> Result<()>,
) -> Result<()> {
    tensor.inplace_op1(&InPlaceChange(RefCell::new(f)))
}

/// Like [`change`] for several tensors, each with its own memory.
pub(super) fn change_all<E: Element>(
    tensors: &[&Tensor],
    held: Vec<&mut [E]>,
    f: &mut dyn FnMut(Vec<&mut [E]>) -> Result<()>,
) -> Result<()> {
    match tensors {
        [] => f(held),
        [first, rest @ ..] => change(first, |elements| {
            let mut held: Vec<&mut [E]> = held; // no longer than `elements`
            held.push(elements);
            change_all(rest, held, f)
        }),
    }
}

/// Without the type of the closure: candle would compile all of its op again for each.
struct InPlaceChange<'a, 'f>(RefCell<&'a mut ChangeStorage<'f>>);

type ChangeStorage<'f> = dyn FnMut(&mut CpuStorage, &Layout) -> Result<()> + 'f;

impl InplaceOp1 for InPlaceChange<'_, '_> {
    fn name(&self) -> &'static str {
        "change"
    }

    fn cpu_fwd(&self, storage: &mut CpuStorage, layout: &Layout) -> Result<()> {
        (self.0.borrow_mut())(storage, layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sixteen_bits_are_rounded_to_the_nearest() {
        for bits in (0..=u32::MAX).step_by(977).chain((0..=u16::MAX).flat_map(|half| {
            // Each half, and the numbers around each middle between two halves.
            let bits = f16::from_bits(half).to_f32().to_bits();
            [0, 0xfff, 0x1000, 0x1001, 0x1fff].map(|more| bits.wrapping_add(more))
        })) {
            let x = f32::from_bits(bits);
            let (half, want) = (<f16 as Element>::store(x), f16::from_f32(x));
            assert!(
                half.is_nan() && want.is_nan() || half.to_bits() == want.to_bits(),
                "{x:e}: {half:?} for {want:?}"
            );
            let (brain, want) = (<bf16 as Element>::store(x), bf16::from_f32(x));
            assert!(
                brain.is_nan() && want.is_nan() || brain.to_bits() == want.to_bits(),
                "{x:e}: {brain:?} for {want:?}"
            );
        }
    }

    #[test]
    fn sixteen_bits_are_widened_exactly() {
        for bits in 0..=u16::MAX {
            let (half, brain) = (f16::from_bits(bits), bf16::from_bits(bits));
            assert!(
                half.is_nan() && half.load().is_nan() || half.load().to_bits() == half.to_f32().to_bits(),
                "{half:?}"
            );
            assert!(brain.is_nan() && brain.load().is_nan() || brain.load() == brain.to_f32(), "{brain:?}");
        }
    }
}
