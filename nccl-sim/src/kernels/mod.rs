//! candle's kernels as host code, found by the names that candle asks for. The real ones are in candle-kernels 0.11.1. `draw`
//! and `rows` have those of this repository.
mod convolution;
mod draw;
mod elementwise;
mod indexing;
mod reduce;
mod rows;

use crate::engine::Exec;
use crate::number::{Element, Type, elements};

/// The size of a parameter.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Size {
    One,
    Two,
    Four,
    Eight,
}

impl Size {
    fn of(ty: Type) -> Self {
        match ty.size() {
            1 => Self::One,
            2 => Self::Two,
            4 => Self::Four,
            _ => Self::Eight,
        }
    }
}

type Run = fn(&Kernel, &mut Exec<'_>, &[u64]) -> Option<()>;

/// A kernel: its parameters and its code.
#[derive(Clone)]
pub(crate) struct Kernel {
    name: String,
    /// The part of the name that says what it computes.
    op: String,
    ty: Type,
    /// The type of the ids of an index kernel, and the source of a cast.
    other: Type,
    parameters: Vec<Size>,
    run: Run,
}

impl Kernel {
    /// Returns the kernel of a name, unless candle-kernels has none: of i16 and i32 it has `affine` alone, its casts lack i64 with
    /// 16-bit floats, its convolutions signed integers, and floats alone have unary functions.
    pub(crate) fn named(name: &str) -> Option<Self> {
        use Size::Eight;
        let (op, last) = name.rsplit_once('_')?;
        let ty = Type::named(last)?;
        let scalar = Size::of(ty);
        let float = matches!(ty, Type::Bf16 | Type::F16 | Type::F32 | Type::F64);
        let unary = vec![Eight; 5];
        let (op, other) = match op.rsplit_once('_').and_then(|(op, other)| Some((op, Type::named(other)?))) {
            Some((op, other)) => (op, other),
            None => (op, ty),
        };
        if op != "affine" && [ty, other].iter().any(|ty| matches!(ty, Type::I16 | Type::I32)) {
            return None;
        }
        let (parameters, run): (Vec<Size>, Run) = match op {
            "affine" => ([&unary[..], &[scalar; 2]].concat(), elementwise::affine),
            "ucopy" => (unary, elementwise::copy),
            "uelu" | "upowf" if float => {
                ([&[Eight; 3][..], &[scalar], &[Eight; 2]].concat(), elementwise::with_number)
            }
            "cast" if castable(other, ty) => (unary, elementwise::cast),
            "const_set" => ([&[Eight; 3][..], &[scalar, Eight]].concat(), elementwise::const_set),
            "copy2d" => ([&[Eight; 2][..], &[Size::Four; 4]].concat(), elementwise::copy2d),
            "where" => (vec![Eight; 7], elementwise::choose),
            "badd" | "bsub" | "bmul" | "bdiv" | "bminimum" | "bmaximum" => {
                (vec![Eight; 6], elementwise::binary)
            }
            "eq" | "ne" | "lt" | "le" | "gt" | "ge" => (vec![Eight; 6], elementwise::compare),
            "fast_sum" | "fast_sum_small" | "fast_min" | "fast_max" | "fast_argmin" | "fast_argmax" => {
                (vec![Eight; 6], reduce::reduce)
            }
            "is" => (vec![Eight; 10], indexing::index_select),
            "draw_uniform" | "draw_normal" | "draw_bernoulli" if matches!(ty, Type::F32 | Type::F64) => {
                ([&[Eight; 8][..], &[scalar; 2]].concat(), draw::draw)
            }
            "take_rows" if float => ([&[Eight; 5][..], &[scalar]].concat(), rows::take),
            "put_rows" if float => (vec![Eight; 5], rows::put),
            "im2col1d" if ty != Type::I64 => (vec![Eight; 9], convolution::im2col1d),
            "im2col" if ty != Type::I64 => (vec![Eight; 11], convolution::im2col),
            "col2im1d" if ty != Type::I64 => (vec![Eight; 8], convolution::col2im1d),
            "conv_transpose1d" if ty != Type::I64 => (vec![Eight; 10], convolution::conv_transpose1d),
            "conv_transpose2d" if ty != Type::I64 => (vec![Eight; 11], convolution::conv_transpose2d),
            "gather" => (vec![Eight; 8], indexing::gather),
            "ia" => (vec![Eight; 8], indexing::index_add),
            "s" | "sa" => (vec![Eight; 7], indexing::scatter),
            _ if float && elementwise::function(op).is_some() => (unary, elementwise::unary),
            _ => return None,
        };
        Some(Self { name: name.to_string(), op: op.to_string(), ty, other, parameters, run })
    }

    pub(crate) fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn parameters(&self) -> &[Size] {
        &self.parameters
    }

    pub(crate) fn run(&self, exec: &mut Exec<'_>, values: &[u64]) {
        // Memory that must not be read is reported where it is read; the kernel then writes nothing.
        let _ = (self.run)(self, exec, values);
    }
}

/// Returns whether candle-kernels has this cast.
fn castable(from: Type, to: Type) -> bool {
    let of =
        |ty| matches!(ty, Type::U8 | Type::U32 | Type::I64 | Type::Bf16 | Type::F16 | Type::F32 | Type::F64);
    let half = |ty| matches!(ty, Type::Bf16 | Type::F16);
    of(from) && of(to) && !(from == Type::I64 && half(to)) && !(half(from) && to == Type::I64)
}

/// Returns the offsets of the elements of a layout in elements. Without strides, it is contiguous.
fn offsets(count: usize, dims: &[u64], strides: &[u64]) -> Vec<usize> {
    if strides.is_empty() && (dims.is_empty() || count > 1) {
        return (0..count).collect();
    }
    let at = |mut index: usize| {
        let mut offset = 0;
        for (&dim, &stride) in dims.iter().zip(strides).rev() {
            offset += index % dim as usize * stride as usize;
            index /= dim as usize;
        }
        offset
    };
    (0..count).map(at).collect()
}

/// Returns the elements at some offsets. Notes a read of exactly these bytes.
fn load<T: Element>(exec: &mut Exec<'_>, base: u64, offsets: &[usize]) -> Option<Vec<T>> {
    if offsets.is_empty() {
        return Some(Vec::new());
    }
    let (mut low, mut high, mut from) = (offsets[0], offsets[0], offsets[0]);
    let mut next = from;
    let note = |exec: &mut Exec<'_>, from: usize, to: usize| {
        exec.note_read(base + (from * T::SIZE) as u64, (to - from) * T::SIZE).then_some(())
    };
    for &offset in offsets {
        (low, high) = (low.min(offset), high.max(offset));
        if offset == next {
            next += 1;
        } else if offset + 1 != next {
            note(exec, from, next)?;
            (from, next) = (offset, offset + 1);
        }
    }
    note(exec, from, next)?;
    let all = elements::<T>(&exec.peek(base + (low * T::SIZE) as u64, (high + 1 - low) * T::SIZE)?);
    Some(offsets.iter().map(|&offset| all[offset - low]).collect())
}

/// Returns an array of dims and strides, in parts of `ndim`.
fn info(exec: &mut Exec<'_>, address: u64, ndim: usize, parts: usize) -> Option<Vec<Vec<u64>>> {
    if address == 0 {
        return Some(vec![Vec::new(); parts]);
    }
    let all = elements::<u64>(&exec.read(address, 8 * ndim * parts)?);
    Some((0..parts).map(|part| all[part * ndim..(part + 1) * ndim].to_vec()).collect())
}

/// Returns the number in the bits of a parameter.
fn number<T: Element>(bits: u64) -> T {
    T::from_bytes(&bits.to_le_bytes()[..T::SIZE])
}
