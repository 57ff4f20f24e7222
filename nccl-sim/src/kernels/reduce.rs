//! Reductions. The order of a sum is the kernel's choice; here it is that of the elements.
use super::{Kernel, info, load, offsets};
use crate::engine::Exec;
use crate::number::{Element, Type, bytes, with_type};

pub(super) fn reduce(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let (each, ndim) = (v[1] as usize, v[2] as usize);
    let total = if kernel.op == "fast_sum_small" { v[0] as usize * each } else { v[0] as usize };
    let layout = info(exec, v[3], ndim, 2)?;
    let float = matches!(kernel.ty, Type::Bf16 | Type::F16 | Type::F32 | Type::F64);
    with_type!(kernel.ty, T => {
        let from = load::<T>(exec, v[4], &offsets(total, &layout[0], &layout[1]))?;
        if each == 0 {
            // The sum of no elements. Candle refuses the other reductions of nothing.
            exec.write(v[5], &bytes(vec![T::from_int(0); v[0] as usize]));
            return Some(());
        }
        let rows = from.chunks_exact(each);
        // NaN: the comparisons of the real kernels drop it as well.
        let best = |row: &[T], better: fn(&T, &T) -> bool| {
            (1..row.len()).fold(0, |at, next| if better(&row[next], &row[at]) { next } else { at })
        };
        let out = match kernel.op.as_str() {
            "fast_min" => bytes(rows.map(|row| row[best(row, |a, b| a < b)])),
            "fast_max" => bytes(rows.map(|row| row[best(row, |a, b| a > b)])),
            "fast_argmin" => bytes(rows.map(|row| best(row, |a, b| a < b) as u32)),
            "fast_argmax" => bytes(rows.map(|row| best(row, |a, b| a > b) as u32)),
            // 16-bit floats accumulate wider.
            _ if float => bytes(rows.map(|row| T::from_float(row.iter().map(|x| x.float()).sum()))),
            _ => bytes(rows.map(|row| row.iter().fold(T::from_int(0), |sum, &x| Element::add(sum, x)))),
        };
        exec.write(v[5], &out);
    });
    Some(())
}
