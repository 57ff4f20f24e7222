//! Kernels that read or write elements by index. The greatest number of the ids' type skips an element.
use super::{Kernel, info, load, offsets};
use crate::engine::Exec;
use crate::number::{Element, Type, bytes, elements, with_type};
use crate::report::{Kind, fault};

/// Returns the ids; `None` for those to skip.
fn ids(
    kernel: &Kernel,
    exec: &mut Exec<'_>,
    address: u64,
    at: &[usize],
    size: u64,
) -> Option<Vec<Option<usize>>> {
    let skip = match kernel.other {
        Type::U8 => f64::from(u8::MAX),
        Type::U32 => f64::from(u32::MAX),
        _ => i64::MAX as f64,
    };
    let ids: Vec<f64> = with_type!(kernel.other, I => {
        load::<I>(exec, address, at)?.into_iter().map(|id| id.float()).collect()
    });
    if let Some(bad) = ids.iter().find(|&&id| id != skip && !(id >= 0.0 && id < size as f64)) {
        let site = exec.site().clone();
        fault(Kind::Memory, site.call(), format!("{site}: the id {bad} is not below {size}"));
        return None;
    }
    Some(ids.into_iter().map(|id| (id != skip).then_some(id as usize)).collect())
}

fn contiguous<T: Element>(exec: &mut Exec<'_>, address: u64, count: u64) -> Option<Vec<T>> {
    Some(elements(&exec.read(address, count as usize * T::SIZE)?))
}

pub(super) fn index_select(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let [left, dim, count, right] = [v[6], v[7], v[8], v[9]];
    let layout = info(exec, v[2], v[1] as usize, 2)?;
    let ids = ids(kernel, exec, v[3], &offsets(count as usize, &layout[0], &layout[1]), dim)?;
    with_type!(kernel.ty, T => {
        let from = contiguous::<T>(exec, v[4], left * dim * right)?;
        let mut out = Vec::new();
        for block in 0..left as usize {
            for id in &ids {
                let row = id.map(|id| (block * dim as usize + id) * right as usize);
                out.extend((0..right as usize).map(|at| row.map_or(T::from_int(0), |row| from[row + at])));
            }
        }
        exec.write(v[5], &bytes(out));
    });
    Some(())
}

pub(super) fn gather(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let [left, dim, count, right] = [v[4], v[5], v[6], v[7]];
    let all: Vec<usize> = (0..(left * count * right) as usize).collect();
    let ids = ids(kernel, exec, v[1], &all, dim)?;
    with_type!(kernel.ty, T => {
        let from = contiguous::<T>(exec, v[2], left * dim * right)?;
        let of = |(at, id): (usize, &Option<usize>)| {
            let (block, column) = (at / (count * right) as usize, at % right as usize);
            id.map_or(T::from_int(0), |id| from[(block * dim as usize + id) * right as usize + column])
        };
        exec.write(v[3], &bytes(ids.iter().enumerate().map(of)));
    });
    Some(())
}

pub(super) fn index_add(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let [left, from_dim, to_dim, right] = [v[4], v[5], v[6], v[7]];
    let all: Vec<usize> = (0..v[1] as usize).collect();
    let ids = ids(kernel, exec, v[0], &all, to_dim)?;
    with_type!(kernel.ty, T => {
        let from = contiguous::<T>(exec, v[2], left * from_dim * right)?;
        let mut to = contiguous::<T>(exec, v[3], left * to_dim * right)?;
        for block in 0..left as usize {
            for (at, id) in ids.iter().enumerate() {
                let Some(id) = id else { continue };
                for column in 0..right as usize {
                    let sum = &mut to[(block * to_dim as usize + id) * right as usize + column];
                    *sum = Element::add(*sum, from[(block * from_dim as usize + at) * right as usize + column]);
                }
            }
        }
        exec.write(v[3], &bytes(to));
    });
    Some(())
}

pub(super) fn scatter(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let [left, from_dim, to_dim, right] = [v[3], v[4], v[5], v[6]];
    let all: Vec<usize> = (0..(left * from_dim * right) as usize).collect();
    let ids = ids(kernel, exec, v[0], &all, to_dim)?;
    with_type!(kernel.ty, T => {
        let from = contiguous::<T>(exec, v[1], left * from_dim * right)?;
        let mut to = contiguous::<T>(exec, v[2], left * to_dim * right)?;
        for (at, id) in ids.iter().enumerate() {
            let Some(id) = id else { continue };
            let (block, column) = (at / (from_dim * right) as usize, at % right as usize);
            let place = &mut to[(block * to_dim as usize + id) * right as usize + column];
            *place = if kernel.op == "sa" { Element::add(*place, from[at]) } else { from[at] };
        }
        exec.write(v[2], &bytes(to));
    });
    Some(())
}
