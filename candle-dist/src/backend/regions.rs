//! Copies of tensor regions into one buffer.
use super::guards::Guards;
use super::overwrite::{HostWrite, write_host};
use super::reduce::Element;
use super::sink::{Given, Sink};
use crate::{Error, Result};
use candle_core::{CpuStorage, Storage, StorageRef, Tensor, WithDType};
use smallvec::SmallVec;

/// A part of a tensor along one dim.
#[derive(Debug, Clone, Copy)]
pub(super) struct Piece {
    pub(super) dim: usize,
    pub(super) start: usize,
    pub(super) len: usize,
}

impl Piece {
    /// The number of its elements.
    pub(super) fn count(self, of: &Tensor) -> usize {
        let others = of.dims().iter().enumerate().filter(|(dim, _)| *dim != self.dim);
        self.len * others.map(|(_, &len)| len).product::<usize>()
    }
}

/// Evaluates `$body` with `$t` naming the element type of `$dtype`, for the dtypes that groups carry.
macro_rules! with_element {
    ($dtype:expr, $t:ident => $body:expr) => {{
        macro_rules! arm {
            ($element:ty) => {{
                type $t = $element;
                $body
            }};
        }
        match $dtype {
            candle_core::DType::U8 => arm!(u8),
            candle_core::DType::U32 => arm!(u32),
            candle_core::DType::I16 => arm!(i16),
            candle_core::DType::I32 => arm!(i32),
            candle_core::DType::I64 => arm!(i64),
            candle_core::DType::F8E4M3 => arm!(float8::F8E4M3),
            candle_core::DType::BF16 => arm!(half::bf16),
            candle_core::DType::F16 => arm!(half::f16),
            candle_core::DType::F32 => arm!(f32),
            candle_core::DType::F64 => arm!(f64),
            other => Err($crate::Error::Unsupported(format!(
                "{} tensors in a process group; cast to one of {}",
                other.as_str(),
                crate::group::check::carried()
            ))),
        }
    }};
}
pub(super) use with_element;

/// A contiguous host tensor, or a [`Piece`] of it, as equal runs of elements at equal distances.
pub(super) struct Runs<'a, T> {
    data: &'a [T],
    stride: usize,
    /// Elements in one run; the whole tensor is a single run.
    pub(super) run: usize,
    /// Elements in all runs.
    pub(super) total: usize,
}

impl<'a, T: WithDType> Runs<'a, T> {
    pub(super) fn new(tensor: &Tensor, storage: &'a StorageRef<'_>, piece: Option<Piece>) -> Result<Self> {
        let Storage::Cpu(cpu) = &**storage else {
            return Err(Error::Unsupported(
                "only host tensors are moved; move the tensor to Device::Cpu first".to_string(),
            ));
        };
        let (start, len) = (tensor.layout().start_offset(), tensor.elem_count());
        // A view without elements may start behind its memory.
        let all = if len == 0 { &[] } else { &cpu.as_slice::<T>()?[start..start + len] };
        let Some(Piece { dim, start, len }) = piece else {
            return Ok(Self { data: all, stride: all.len(), run: all.len(), total: all.len() });
        };
        let inner: usize = tensor.dims()[dim + 1..].iter().product();
        let outer: usize = tensor.dims()[..dim].iter().product();
        let (run, stride) = (len * inner, tensor.dims()[dim] * inner);
        let data = if run * outer == 0 { &[] } else { &all[start * inner..] };
        Ok(Self { data, stride, run, total: run * outer })
    }

    /// Elements that lie in one run.
    #[cfg(feature = "mpi")]
    pub(super) fn flat(data: &'a [T]) -> Self {
        Self { data, stride: data.len(), run: data.len(), total: data.len() }
    }

    /// The elements `at..at + len` in row-major order; they must lie in one run.
    pub(super) fn slice(&self, at: usize, len: usize) -> &'a [T] {
        let offset = at / self.run * self.stride + at % self.run;
        &self.data[offset..offset + len]
    }
}

/// The tensors, or a piece of each, joined along dim `join` as one fresh contiguous buffer; dims outside of `join` have
/// one size in all of them.
pub(super) fn concat_pieces(tensors: &[&Tensor], pieces: &[Option<Piece>], join: usize) -> Result<CpuStorage> {
    with_element!(tensors[0].dtype(), T => {
        let count = |(tensor, piece): (&&Tensor, &Option<Piece>)| piece.map_or(tensor.elem_count(), |p| p.count(tensor));
        let mut out: Vec<T> = Vec::with_capacity(tensors.iter().zip(pieces).map(count).sum());
        concat_to(tensors, pieces, join, &mut out)?;
        Ok(T::to_cpu_storage_owned(out))
    })
}

/// Like [`concat_pieces`] with the same `piece` of each.
pub(super) fn concat(tensors: &[&Tensor], piece: Option<Piece>, join: usize) -> Result<CpuStorage> {
    concat_pieces(tensors, &SmallVec::<[_; 8]>::from_elem(piece, tensors.len()), join)
}

/// Like [`concat_pieces`], with the result in the memory of `output`.
pub(super) fn concat_into(output: &Tensor, tensors: &[&Tensor], pieces: &[Option<Piece>], join: usize) -> Result<()> {
    struct Joined<'a>(&'a [&'a Tensor], &'a [Option<Piece>], usize);
    impl HostWrite for Joined<'_> {
        fn write<T: Element>(&self, to: &mut [T]) -> Result<()> {
            concat_to(self.0, self.1, self.2, &mut Given(to))
        }
    }
    write_host(output, &Joined(tensors, pieces, join))
}

fn concat_to<T: WithDType>(
    tensors: &[&Tensor],
    pieces: &[Option<Piece>],
    join: usize,
    out: &mut impl Sink<T>,
) -> Result<()> {
    let guards = Guards::new(tensors);
    let sources = tensors.iter().zip(guards.iter()).zip(pieces);
    let sources = sources.map(|((t, g), &piece)| Runs::<T>::new(t, g, piece)).collect::<Result<Vec<_>>>()?;
    let rows: usize = (0..join)
        .map(|d| match pieces[0] {
            Some(p) if p.dim == d => p.len,
            _ => tensors[0].dims()[d],
        })
        .product();
    for row in 0..rows {
        for source in sources.iter().filter(|s| s.total > 0) {
            // A block of the result and a run of the source divide one another.
            let block = source.total / rows;
            let step = block.min(source.run);
            for at in (row * block..(row + 1) * block).step_by(step) {
                out.copy(source.slice(at, step));
            }
        }
    }
    Ok(())
}
