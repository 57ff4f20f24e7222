//! Kernels that compute each element by itself.
use super::{Kernel, info, load, number, offsets};
use crate::engine::Exec;
use crate::number::{Element, bytes, elements, with_type};

/// Returns the elements of a source whose layout is in `info`, or contiguous.
fn source<T: Element>(exec: &mut Exec<'_>, [count, ndim, array]: [u64; 3], address: u64) -> Option<Vec<T>> {
    let layout = info(exec, array, ndim as usize, 2)?;
    load(exec, address, &offsets(count as usize, &layout[0], &layout[1]))
}

pub(super) fn affine(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    with_type!(kernel.ty, T => {
        let (mul, add) = (number::<T>(v[5]), number::<T>(v[6]));
        let from = source::<T>(exec, [v[0], v[1], v[2]], v[3])?;
        exec.write(v[4], &bytes(from.into_iter().map(|x| Element::add(Element::mul(x, mul), add))));
    });
    Some(())
}

pub(super) fn copy(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    with_type!(kernel.ty, T => {
        let from = source::<T>(exec, [v[0], v[1], v[2]], if v[3] == 0 { v[4] } else { v[3] })?;
        exec.write(v[4], &bytes(from));
    });
    Some(())
}

/// Returns the unary function of a name.
pub(super) fn function(op: &str) -> Option<fn(f64) -> f64> {
    Some(match op {
        "uexp" => f64::exp,
        "ulog" => f64::ln,
        "usin" => f64::sin,
        "ucos" => f64::cos,
        "utanh" => f64::tanh,
        "uneg" => |x| -x,
        "urecip" => f64::recip,
        "usqr" => |x| x * x,
        "usqrt" => f64::sqrt,
        "ugelu" => {
            |x| 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * x * (1.0 + 0.044715 * x * x)).tanh())
        }
        "ugelu_erf" => |x| x * 0.5 * (1.0 + libm::erf(x / std::f64::consts::SQRT_2)),
        "uerf" => libm::erf,
        "usilu" => |x| x / (1.0 + (-x).exp()),
        "uabs" => f64::abs,
        "uceil" => f64::ceil,
        "ufloor" => f64::floor,
        "uround" => f64::round,
        "urelu" => |x| if x < 0.0 { 0.0 } else { x },
        "usign" => |x| f64::from(i8::from(x > 0.0) - i8::from(x < 0.0)),
        "usigmoid" => |x| 1.0 / (1.0 + (-x).exp()),
        _ => return None,
    })
}

pub(super) fn unary(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let function = function(&kernel.op)?;
    with_type!(kernel.ty, T => {
        let from = source::<T>(exec, [v[0], v[1], v[2]], if v[3] == 0 { v[4] } else { v[3] })?;
        exec.write(v[4], &bytes(from.into_iter().map(|x| T::from_float(function(x.float())))));
    });
    Some(())
}

pub(super) fn with_number(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    with_type!(kernel.ty, T => {
        let parameter = number::<T>(v[3]).float();
        let of = |x: f64| match kernel.op.as_str() {
            "uelu" if x < 0.0 => parameter * x.exp_m1(),
            "uelu" => x,
            _ => x.powf(parameter),
        };
        let from = source::<T>(exec, [v[0], v[1], v[2]], v[4])?;
        exec.write(v[5], &bytes(from.into_iter().map(|x| T::from_float(of(x.float())))));
    });
    Some(())
}

pub(super) fn cast(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    with_type!(kernel.other, S => {
        let from = source::<S>(exec, [v[0], v[1], v[2]], v[3])?;
        with_type!(kernel.ty, D => exec.write(v[4], &bytes(from.into_iter().map(|x| x.to::<D>()))));
    });
    Some(())
}

pub(super) fn const_set(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let layout = info(exec, v[2], v[1] as usize, 2)?;
    let value = v[3].to_le_bytes();
    let size = kernel.ty.size();
    if v[2] == 0 {
        exec.write(v[4], &value[..size].repeat(v[0] as usize));
        return Some(());
    }
    for offset in offsets(v[0] as usize, &layout[0], &layout[1]) {
        exec.write(v[4] + (offset * size) as u64, &value[..size]);
    }
    Some(())
}

pub(super) fn copy2d(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let size = kernel.ty.size() as u64;
    for row in 0..v[2] {
        let data = exec.read(v[0] + row * v[4] * size, (v[3] * size) as usize)?;
        exec.write(v[1] + row * v[5] * size, &data);
    }
    Some(())
}

pub(super) fn choose(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let (count, ndim) = (v[0] as usize, v[1] as usize);
    let layout = info(exec, v[2], ndim, 4)?;
    let of = |part: usize| offsets(count, &layout[0], &layout[part]);
    let condition: Vec<bool> = with_type!(kernel.other, I => {
        load::<I>(exec, v[3], &of(1))?.into_iter().map(|x| x.float() != 0.0).collect()
    });
    with_type!(kernel.ty, T => {
        let (yes, no) = (load::<T>(exec, v[4], &of(2))?, load::<T>(exec, v[5], &of(3))?);
        let chosen = condition.into_iter().zip(yes.into_iter().zip(no)).map(|(is, (yes, no))| if is { yes } else { no });
        exec.write(v[6], &bytes(chosen));
    });
    Some(())
}

/// Returns the elements of both operands.
fn operands<T: Element>(exec: &mut Exec<'_>, v: &[u64]) -> Option<(Vec<T>, Vec<T>)> {
    let layout = info(exec, v[2], v[1] as usize, 3)?;
    let left = load(exec, v[3], &offsets(v[0] as usize, &layout[0], &layout[1]))?;
    Some((left, load(exec, v[4], &offsets(v[0] as usize, &layout[0], &layout[2]))?))
}

pub(super) fn binary(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    with_type!(kernel.ty, T => {
        let (left, right) = operands::<T>(exec, v)?;
        let of = |(a, b): (T, T)| match kernel.op.as_str() {
            "badd" => Element::add(a, b),
            "bsub" => Element::sub(a, b),
            "bmul" => Element::mul(a, b),
            "bdiv" => Element::div(a, b),
            "bminimum" => a.least(b),
            _ => a.most(b),
        };
        exec.write(v[5], &bytes(left.into_iter().zip(right).map(of)));
    });
    Some(())
}

pub(super) fn compare(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let out: Vec<u8> = with_type!(kernel.ty, T => {
        let (left, right) = operands::<T>(exec, v)?;
        let of = |(a, b): (T, T)| match kernel.op.as_str() {
            "eq" => a == b,
            "ne" => a != b,
            "lt" => a < b,
            "le" => a <= b,
            "gt" => a > b,
            _ => a >= b,
        };
        left.into_iter().zip(right).map(|pair| u8::from(of(pair))).collect()
    });
    exec.write(v[5], &bytes(elements::<u8>(&out)));
    Some(())
}
