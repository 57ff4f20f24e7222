//! Bytes that the ranks of a group hold together.
use crate::Result;
use candle_core::{DType, Device, Tensor};
use candle_dist::{Collective, Cut, ProcessGroup};

/// Bytes of which each rank of a group holds a piece, one behind another. They are gathered for each use.
#[derive(Debug)]
pub(in crate::nn) struct SharedBytes {
    piece: Tensor,
    /// The bytes of each rank.
    sizes: Vec<usize>,
    group: ProcessGroup,
}

impl SharedBytes {
    /// Shares the bytes that are `described` in errors, of which this rank has the `piece`.
    pub(in crate::nn) fn new(
        piece: Tensor,
        sizes: Vec<usize>,
        group: &ProcessGroup,
        described: String,
    ) -> Self {
        Self { piece, sizes, group: group.with_description(described) }
    }

    /// Returns a piece of these bytes.
    pub(in crate::nn) fn piece(bytes: Vec<u8>, device: &Device) -> Result<Tensor> {
        Ok(match bytes.len() {
            0 => Tensor::zeros(0, DType::U8, device)?,
            count => Tensor::from_vec(bytes, count, device)?,
        })
    }

    /// The bytes of this rank.
    pub(in crate::nn) fn own(&self) -> usize {
        self.piece.elem_count()
    }

    /// Returns the bytes of all ranks. All ranks of the group call it.
    pub(in crate::nn) fn gather(&self) -> Result<Vec<u8>> {
        let gather = Collective::all_gather(Cut::new(0, &self.sizes));
        let whole = self.group.call(gather).run(&self.piece)?;
        Ok(whole.to_device(&Device::Cpu)?.to_vec1()?)
    }
}
