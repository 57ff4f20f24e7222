//! Copies regions of tensors into one buffer.
use super::element::{ReduceElement, with_element};
use super::guards::Guards;
use super::overwrite::{HostWrite, write_host};
use super::runs::{DimPiece, TensorRuns};
use super::sink::{Sink, SliceSink};
use super::storage::StorageOperand;
use crate::Result;
use candle_core::{CpuStorage, Tensor, WithDType};
use smallvec::SmallVec;

/// Joins the tensors, or a piece of each, along dim `join` as one new contiguous buffer. All other dims must have equal
/// sizes.
pub(super) fn concat_pieces(
    tensors: &[StorageOperand<'_>],
    pieces: &[Option<DimPiece>],
    join: usize,
) -> Result<CpuStorage> {
    with_element!(tensors[0].dtype(), T => {
        let count = |(tensor, piece): (&StorageOperand<'_>, &Option<DimPiece>)| piece.map_or(tensor.elem_count(), |p| p.count(tensor));
        let mut out: Vec<T> = Vec::with_capacity(tensors.iter().zip(pieces).map(count).sum());
        concat_to(tensors, pieces, join, &mut out)?;
        Ok(T::to_cpu_storage_owned(out))
    })
}

/// Like [`concat_pieces`], with the same `piece` of each tensor.
pub(super) fn concat(
    tensors: &[StorageOperand<'_>],
    piece: Option<DimPiece>,
    join: usize,
) -> Result<CpuStorage> {
    concat_pieces(tensors, &SmallVec::<[_; 8]>::from_elem(piece, tensors.len()), join)
}

/// Like [`concat_pieces`], but writes the result to the memory of `output`.
pub(super) fn concat_into(
    output: &Tensor,
    tensors: &[StorageOperand<'_>],
    pieces: &[Option<DimPiece>],
    join: usize,
) -> Result<()> {
    struct Joined<'a>(&'a [StorageOperand<'a>], &'a [Option<DimPiece>], usize);
    impl HostWrite for Joined<'_> {
        fn write<T: ReduceElement>(&self, to: &mut [T]) -> Result<()> {
            concat_to(self.0, self.1, self.2, &mut SliceSink(to))
        }
    }
    write_host(output, &Joined(tensors, pieces, join))
}

fn concat_to<T: WithDType>(
    tensors: &[StorageOperand<'_>],
    pieces: &[Option<DimPiece>],
    join: usize,
    out: &mut impl Sink<T>,
) -> Result<()> {
    let guards = Guards::new(tensors);
    let sources = tensors.iter().zip(guards.iter()).zip(pieces);
    let sources = sources
        .map(|((t, g), &piece)| TensorRuns::<T>::new(t, g, piece))
        .collect::<Result<SmallVec<[TensorRuns<'_, T>; 8]>>>()?;
    let rows: usize = (0..join)
        .map(|d| match pieces[0] {
            Some(p) if p.dim == d => p.len,
            _ => tensors[0].dims()[d],
        })
        .product();
    for row in 0..rows {
        for source in sources.iter().filter(|s| s.total > 0) {
            // One of a block of the result and a run of the source divides the other.
            let block = source.total / rows;
            let step = block.min(source.run);
            for at in (row * block..(row + 1) * block).step_by(step) {
                out.copy(source.slice(at, step));
            }
        }
    }
    Ok(())
}
