//! Pieces of CPU tensors as runs of elements.
use crate::{Error, Result};
use candle_core::{Storage, StorageRef, Tensor, WithDType};

/// A piece of a tensor along one dim.
#[derive(Debug, Clone, Copy)]
pub(super) struct DimPiece {
    pub(super) dim: usize,
    pub(super) start: usize,
    pub(super) len: usize,
}

impl DimPiece {
    /// Returns the number of elements of the piece.
    pub(super) fn count(self, of: &Tensor) -> usize {
        let others = of.dims().iter().enumerate().filter(|(dim, _)| *dim != self.dim);
        self.len * others.map(|(_, &len)| len).product::<usize>()
    }
}

/// A contiguous CPU tensor, or a [`DimPiece`] of it, as runs of equal length at equal distances.
pub(super) struct TensorRuns<'a, T> {
    data: &'a [T],
    stride: usize,
    /// The number of elements per run; a whole tensor is a single run.
    pub(super) run: usize,
    /// The number of elements of all runs.
    pub(super) total: usize,
}

impl<'a, T: WithDType> TensorRuns<'a, T> {
    pub(super) fn new(tensor: &Tensor, storage: &'a StorageRef<'_>, piece: Option<DimPiece>) -> Result<Self> {
        let Storage::Cpu(cpu) = &**storage else {
            return Err(Error::Unsupported(
                "only host tensors are moved; move the tensor to Device::Cpu first".to_string(),
            ));
        };
        let (start, len) = (tensor.layout().start_offset(), tensor.elem_count());
        // A view without elements may start behind its memory.
        let all = if len == 0 { &[] } else { &cpu.as_slice::<T>()?[start..start + len] };
        let Some(DimPiece { dim, start, len }) = piece else {
            return Ok(Self { data: all, stride: all.len(), run: all.len(), total: all.len() });
        };
        let inner: usize = tensor.dims()[dim + 1..].iter().product();
        let outer: usize = tensor.dims()[..dim].iter().product();
        let (run, stride) = (len * inner, tensor.dims()[dim] * inner);
        let data = if run * outer == 0 { &[] } else { &all[start * inner..] };
        Ok(Self { data, stride, run, total: run * outer })
    }

    /// Returns a single run of all elements.
    #[cfg(feature = "mpi")]
    pub(super) fn flat(data: &'a [T]) -> Self {
        Self { data, stride: data.len(), run: data.len(), total: data.len() }
    }

    /// Returns the elements `at..at + len` in row-major order, which must lie in one run.
    pub(super) fn slice(&self, at: usize, len: usize) -> &'a [T] {
        let offset = at / self.run * self.stride + at % self.run;
        &self.data[offset..offset + len]
    }
}
