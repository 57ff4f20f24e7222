//! Blocks of floats of four bits as codes with scales.
use super::codes::{Code, E2M1, half_e4m3, half_power_of_2};
use crate::kernels::{ScaleFormat, ScaledFormat};
use std::ops::Range;
use std::sync::{Arc, LazyLock};

/// Twice what four bits of MXFP4 and NVFP4 stand for.
pub(in crate::files::weights) static TWICE_E2M1: LazyLock<Arc<[f32]>> = LazyLock::new(|| E2M1.into());
/// Half of the power of 2 of a byte.
pub(in crate::files::weights) static HALF_POWERS: LazyLock<Arc<[f32]>> =
    LazyLock::new(|| (0..=u8::MAX).map(half_power_of_2).collect());
/// Half of a scale of NVFP4.
static HALF_SCALES: LazyLock<Arc<[f32]>> = LazyLock::new(|| (0..=u8::MAX).map(half_e4m3).collect());

impl Code {
    /// Returns the format of the codes and scales that a block has, if it is one of floats of four bits.
    pub(in crate::files::weights) fn scaled(self) -> Option<ScaledFormat> {
        let (scales, size) = match self {
            Self::Mxfp4 => (&HALF_POWERS, 32),
            Self::Nvfp4 => (&HALF_SCALES, 16),
            _ => return None,
        };
        let scales = ScaleFormat::Table(Arc::clone(scales));
        Some(ScaledFormat { table: TWICE_E2M1.clone(), scales, block: [1, size], factor: 1.0 })
    }

    /// Returns the bytes that `format` has of some columns of rows, whose blocks `around` the columns are given.
    pub(in crate::files::weights) fn scaled_bytes(
        self,
        format: &ScaledFormat,
        blocks: &[u8],
        columns: &Range<usize>,
        around: &Range<usize>,
    ) -> Vec<u8> {
        let (elements, size) = self.block();
        let [_, group] = format.block;
        let of_row = around.len() / elements * size;
        // A block has the scales of its groups, and then the codes of each: the lower bits of the first half, and the upper ones.
        let place = |column: usize| {
            let (block, within) =
                ((column - around.start) / elements * size, (column - around.start) % elements);
            (block, within / group, within % group)
        };
        let code = |row: &[u8], column: usize| {
            let (block, nth, within) = place(column);
            let byte = row[block + elements / group + nth * group / 2 + within % (group / 2)];
            byte >> (4 * (within / (group / 2))) & 15
        };
        let rows = || blocks.chunks_exact(of_row.max(1));
        let pairs = format.code_bytes(columns);
        let codes = rows()
            .flat_map(|row| pairs.clone().map(move |at| code(row, 2 * at) | code(row, 2 * at + 1) << 4))
            .collect::<Vec<u8>>();
        let groups = columns.start / group..columns.end.div_ceil(group);
        let scale = |row: &[u8], nth: usize| {
            let (block, within, _) = place(nth * group);
            row[block + within]
        };
        let scales = rows().flat_map(|row| groups.clone().map(move |nth| scale(row, nth)));
        codes.into_iter().chain(scales).collect()
    }
}
