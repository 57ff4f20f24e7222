//! Messages that MPI sends or receives while the program goes on.
//!
//! MPI reads or writes the memory of a request until it is done, so the request owns it. That is what persistent
//! requests of one start each are for here: they are the only ones of the binding that own their memory.
use super::spare::Spares;
use crate::Result;
use crate::backend::regions::with_element;
use bytemuck::Zeroable;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, WithDType};
use ferrompi::{Communicator, PersistentRequest, Result as MpiResult};
use half::{bf16, f16};

/// A message under way. 16-bit floats, which MPI has no type for, go as bytes.
pub(super) enum Request {
    U8(PersistentRequest<u8>),
    U32(PersistentRequest<u32>),
    I64(PersistentRequest<i64>),
    F32(PersistentRequest<f32>),
    F64(PersistentRequest<f64>),
}

/// Evaluates `$body` with `$inner` bound to the typed request.
macro_rules! typed {
    ($request:expr, $inner:ident => $body:expr) => {
        match $request {
            Request::U8($inner) => $body,
            Request::U32($inner) => $body,
            Request::I64($inner) => $body,
            Request::F32($inner) => $body,
            Request::F64($inner) => $body,
        }
    };
}

impl Request {
    /// Starts to send `data`.
    pub(super) fn send(comm: &Communicator, data: CpuStorage, to: usize, tag: i32) -> MpiResult<Self> {
        let to = to as i32;
        Self::started(match data {
            CpuStorage::U32(data) => Self::U32(comm.send_init(data, to, tag)?),
            CpuStorage::I64(data) => Self::I64(comm.send_init(data, to, tag)?),
            CpuStorage::F32(data) => Self::F32(comm.send_init(data, to, tag)?),
            CpuStorage::F64(data) => Self::F64(comm.send_init(data, to, tag)?),
            data => Self::U8(comm.send_init(into_bytes(data), to, tag)?),
        })
    }

    /// Starts to receive `len` elements, into a spare buffer if one fits.
    pub(super) fn receive(
        comm: &Communicator,
        (dtype, len): (DType, usize),
        from: usize,
        tag: i32,
        spares: &mut Spares,
    ) -> MpiResult<Self> {
        let from = from as i32;
        Self::started(match dtype {
            DType::U32 => Self::U32(comm.recv_init(spares.take(len), from, tag)?),
            DType::I64 => Self::I64(comm.recv_init(spares.take(len), from, tag)?),
            DType::F32 => Self::F32(comm.recv_init(spares.take(len), from, tag)?),
            DType::F64 => Self::F64(comm.recv_init(spares.take(len), from, tag)?),
            dtype => Self::U8(comm.recv_init(spares.take(len * dtype.size_in_bytes()), from, tag)?),
        })
    }

    fn started(mut self) -> MpiResult<Self> {
        typed!(&mut self, request => request.start())?;
        Ok(self)
    }

    /// Whether MPI is done with the message.
    pub(super) fn is_done(&mut self) -> MpiResult<bool> {
        Ok(typed!(self, request => request.test())?.is_some())
    }

    /// The data of a message that MPI is done with.
    pub(super) fn into_data(self, dtype: DType) -> Result<CpuStorage, Box<dyn std::error::Error>> {
        Ok(match self.into_sent()? {
            CpuStorage::U8(bytes) if dtype != DType::U8 => from_bytes(&bytes, dtype)?,
            data => data,
        })
    }

    /// What MPI is done with, as it was sent: 16-bit floats as bytes.
    pub(super) fn into_sent(self) -> MpiResult<CpuStorage> {
        Ok(match self {
            Self::U8(request) => CpuStorage::U8(request.into_buffer()?),
            Self::U32(request) => CpuStorage::U32(request.into_buffer()?),
            Self::I64(request) => CpuStorage::I64(request.into_buffer()?),
            Self::F32(request) => CpuStorage::F32(request.into_buffer()?),
            Self::F64(request) => CpuStorage::F64(request.into_buffer()?),
        })
    }
}

/// The bytes of all elements; without a copy if they are bytes.
pub(super) fn into_bytes(data: CpuStorage) -> Vec<u8> {
    match data {
        CpuStorage::U8(data) => data,
        CpuStorage::U32(data) => bytemuck::cast_slice(&data).to_vec(),
        CpuStorage::I64(data) => bytemuck::cast_slice(&data).to_vec(),
        CpuStorage::BF16(data) => bytemuck::cast_slice::<bf16, _>(&data).to_vec(),
        CpuStorage::F16(data) => bytemuck::cast_slice::<f16, _>(&data).to_vec(),
        CpuStorage::F32(data) => bytemuck::cast_slice(&data).to_vec(),
        CpuStorage::F64(data) => bytemuck::cast_slice(&data).to_vec(),
        // Groups refuse other dtypes before an engine sees them.
        _ => Vec::new(),
    }
}

/// The elements that `bytes` are.
pub(super) fn from_bytes(bytes: &[u8], dtype: DType) -> Result<CpuStorage> {
    with_element!(dtype, T => {
        let mut data = vec![T::zeroed(); bytes.len() / size_of::<T>()];
        let room = bytemuck::cast_slice_mut(&mut data);
        let len = room.len();
        room.copy_from_slice(&bytes[..len]);
        Ok(T::to_cpu_storage_owned(data))
    })
}

/// The number of elements.
pub(super) fn len(data: &CpuStorage) -> Result<usize> {
    with_element!(data.dtype(), T => Ok(data.as_slice::<T>()?.len()))
}

/// The data in parts of at most `limit` bytes each; itself if it fits.
pub(super) fn split(data: CpuStorage, dtype: DType, limit: usize) -> Result<Vec<CpuStorage>> {
    let most = most(dtype, limit);
    with_element!(dtype, T => {
        let all = data.as_slice::<T>()?;
        if all.len() <= most {
            return Ok(vec![data]);
        }
        Ok(all.chunks(most).map(T::to_cpu_storage).collect())
    })
}

/// The lengths of the parts that [`split`] makes of `len` elements.
pub(super) fn part_lens(len: usize, dtype: DType, limit: usize) -> impl Iterator<Item = usize> {
    let most = most(dtype, limit);
    (0..len).step_by(most).map(move |start| most.min(len - start))
}

/// The elements that fit into `limit` bytes.
fn most(dtype: DType, limit: usize) -> usize {
    (limit / dtype.size_in_bytes()).max(1)
}

/// The parts joined again.
pub(super) fn join(mut parts: Vec<CpuStorage>, dtype: DType) -> Result<CpuStorage> {
    if parts.len() == 1 {
        return Ok(parts.remove(0));
    }
    with_element!(dtype, T => {
        let parts = parts.iter().map(|part| part.as_slice::<T>()).collect::<candle_core::Result<Vec<_>>>()?;
        Ok(T::to_cpu_storage_owned(parts.concat()))
    })
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::group::check::CARRIED;
    use candle_core::{Device, Tensor};

    /// The numbers from 0 on.
    fn numbers(len: usize, dtype: DType) -> CpuStorage {
        let numbers = Tensor::arange(0u32, len as u32, &Device::Cpu).unwrap().to_dtype(dtype).unwrap();
        let (storage, _) = numbers.storage_and_layout();
        match &*storage {
            candle_core::Storage::Cpu(storage) => storage.clone(),
            _ => unreachable!("made on the host"),
        }
    }

    #[test]
    fn parts_are_as_long_as_the_receiver_expects_and_join_to_the_whole() {
        for dtype in CARRIED {
            // A limit below an element's bytes still lets one element through.
            for (len, limit) in [(1, 1), (7, 1), (24, 64), (25, 64), (100, 64), (100, 100), (100, 1 << 30)] {
                let what = format!("{len} {dtype:?} in parts of {limit} bytes");
                let parts = split(numbers(len, dtype), dtype, limit).unwrap();
                let lens: Vec<usize> = parts.iter().map(|part| super::len(part).unwrap()).collect();
                assert_eq!(lens, part_lens(len, dtype, limit).collect::<Vec<_>>(), "{what}");
                let most = limit.max(dtype.size_in_bytes()) / dtype.size_in_bytes();
                assert_eq!((lens.len(), lens[0]), (len.div_ceil(most), len.min(most)), "{what}");
                let joined = join(parts, dtype).unwrap();
                assert_eq!(into_bytes(joined), into_bytes(numbers(len, dtype)), "{what}");
            }
        }
    }

    #[test]
    fn bytes_are_elements_again() {
        for dtype in CARRIED {
            let bytes = into_bytes(numbers(100, dtype));
            assert_eq!(bytes.len(), 100 * dtype.size_in_bytes());
            let back = from_bytes(&bytes, dtype).unwrap();
            assert_eq!((back.dtype(), into_bytes(back)), (dtype, bytes));
        }
    }
}
