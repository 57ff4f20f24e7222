//! The kernels of `candle-dist-kernels/src/device_rows/rows.cu`. A test of candle-shard runs the text of the real ones.
use super::Kernel;
use crate::engine::Exec;
use crate::number::elements;
use crate::report::{Kind, fault};
use std::collections::HashSet;

/// The row of no place in the table.
const NOWHERE: u32 = u32::MAX;

pub(super) fn take(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let [count, width, list, table, out, fill] = *v.first_chunk::<6>()?;
    let size = width as usize * kernel.ty.size();
    let filled = fill.to_le_bytes()[..kernel.ty.size()].repeat(width as usize);
    let mut taken = Vec::with_capacity(count as usize * size);
    for row in elements::<u32>(&exec.read(list, 4 * count as usize)?) {
        match row {
            NOWHERE => taken.extend(&filled),
            // Only these bytes: another stream may write other rows.
            _ => taken.extend(exec.read(table + u64::from(row) * size as u64, size)?),
        }
    }
    exec.write(out, &taken);
    Some(())
}

pub(super) fn put(kernel: &Kernel, exec: &mut Exec<'_>, v: &[u64]) -> Option<()> {
    let [count, width, list, values, table] = *v.first_chunk::<5>()?;
    let size = width as usize * kernel.ty.size();
    let rows = elements::<u32>(&exec.read(list, 4 * count as usize)?);
    let mut seen = HashSet::new();
    if let Some(row) = rows.iter().find(|&&row| !seen.insert(row)) {
        let site = exec.site().clone();
        fault(Kind::Race, site.call(), format!("{site}: two threads write row {row}"));
        return None;
    }
    let values = exec.read(values, rows.len() * size)?;
    for (row, values) in rows.into_iter().zip(values.chunks_exact(size)) {
        exec.write(table + u64::from(row) * size as u64, values);
    }
    Some(())
}
