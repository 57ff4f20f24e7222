//! The bytes of the experts of a fully sharded unit, of which each of its ranks holds a part.
use crate::kernels::QuantizedMatrix;
use crate::nn::quantized::{SharedBytes, WeightFormat};
use crate::{Result, Weights};
use candle_core::Device;
use candle_dist::ProcessGroup;
use std::ops::Range;

/// The bytes of matrices, one behind another as files have them, of which each rank of a group holds about as many.
#[derive(Debug)]
pub(super) struct ExpertBytes {
    matrices: Vec<ExpertMatrix>,
    bytes: SharedBytes,
    device: Device,
}

impl ExpertBytes {
    /// Reads this rank's bytes.
    pub(super) fn read(
        matrices: Vec<ExpertMatrix>,
        weights: &Weights,
        group: &ProcessGroup,
        device: &Device,
    ) -> Result<Self> {
        let all: usize = matrices.iter().map(ExpertMatrix::byte_count).sum();
        let most = all.div_ceil(group.size());
        let of = |rank: usize| (rank * most).min(all)..((rank + 1) * most).min(all);
        let mine = of(group.rank());
        let mut bytes = Vec::with_capacity(mine.len());
        let mut start = 0;
        for matrix in &matrices {
            let end = start + matrix.byte_count();
            let both: Range<usize> = mine.start.max(start)..mine.end.min(end);
            if !both.is_empty() {
                let read =
                    matrix.format.read_bytes(weights, (&matrix.name, Some(matrix.expert)), &matrix.part)?;
                bytes.extend_from_slice(&read[both.start - start..both.end - start]);
            }
            start = end;
        }
        let piece = SharedBytes::piece(bytes, device)?;
        let sizes = (0..group.size()).map(|rank| of(rank).len()).collect();
        let bytes = SharedBytes::new(piece, sizes, group, "the blocks of experts".to_owned());
        Ok(Self { matrices, bytes, device: device.clone() })
    }

    /// The bytes of this rank.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.own()
    }

    /// Returns all matrices. All ranks of the group call it.
    pub(super) fn gather(&self) -> Result<Vec<QuantizedMatrix>> {
        let bytes = self.bytes.gather()?;
        let mut rest = &bytes[..];
        let matrix = |matrix: &ExpertMatrix| {
            let (own, behind) = rest.split_at(matrix.byte_count());
            rest = behind;
            let [rows, columns] = &matrix.part;
            matrix.format.join(std::slice::from_ref(rows), columns, own.to_vec(), &self.device)
        };
        self.matrices.iter().map(matrix).collect()
    }
}

/// Rows and columns of a matrix of an expert in files.
#[derive(Debug, Clone)]
pub(super) struct ExpertMatrix {
    pub(super) name: String,
    pub(super) expert: usize,
    pub(super) format: WeightFormat,
    pub(super) part: [Range<usize>; 2],
}

impl ExpertMatrix {
    fn byte_count(&self) -> usize {
        self.format.byte_count(&self.part)
    }
}
