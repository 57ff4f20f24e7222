//! Copies to a GPU on a stream of their own.
//!
//! Memory of a stream is used again in the order of that stream. So what arrives on the side stream stays in memory that
//! this room owns, and the stream of the computation copies it from there into memory of its own. That takes the time of
//! one pass over GPU memory, a small part of the way from the host.
//!
//! Nothing here relies on the events that cudarc records for slices: a program may switch them off.
use crate::Result;
use crate::backend::Fresh;
use crate::backend::cuda::{address, driver, memory, written};
use crate::bits::with_bytes;
use candle_core::cuda_backend::cudarc::driver::{
    CudaEvent, CudaSlice, CudaStream, DevicePtr, DevicePtrMut, PinnedHostSlice, result,
};
use candle_core::{CudaDevice, DType, Shape, Storage, Tensor};
use parking_lot::Mutex;
use std::sync::Arc;

/// Each tensor begins at a multiple of these bytes.
const ALIGNMENT: usize = 256;

/// The stream of the copies to a GPU, and the memory that they use in turn.
pub(super) struct CopyEngine {
    device: CudaDevice,
    stream: Arc<CudaStream>,
    idle: Mutex<Vec<StagingBuffers>>,
}

/// Memory on both ends of a copy.
struct StagingBuffers {
    host: PinnedHostSlice<u8>,
    gpu: CudaSlice<u8>,
    /// The end of the last copy between them.
    copied: Option<CudaEvent>,
}

impl Drop for StagingBuffers {
    fn drop(&mut self) {
        // Host memory must not go while a copy reads it. A drop cannot return errors.
        if let Some(copied) = &self.copied {
            let _ = copied.synchronize();
        }
    }
}

/// Returns whether a tensor is copied on the side stream.
pub(super) fn takes(t: &Tensor) -> bool {
    use DType::{BF16, F16, F32, F64, I64, U8, U32};
    let is_known = matches!(t.dtype(), U8 | U32 | I64 | BF16 | F16 | F32 | F64);
    is_known && t.device().is_cpu() && t.elem_count() > 0 && !t.track_op()
}

fn bytes_of(shape: &Shape, dtype: DType) -> usize {
    shape.elem_count() * dtype.size_in_bytes()
}

impl CopyEngine {
    pub(super) fn new(device: &CudaDevice) -> Result<Arc<Self>> {
        let stream = device.cuda_stream().context().new_stream().map_err(driver)?;
        Ok(Arc::new(Self { device: device.clone(), stream, idle: Mutex::default() }))
    }

    /// Returns idle memory of at least `len` bytes, or allocates it.
    fn buffers(&self, len: usize) -> Result<StagingBuffers> {
        {
            let mut idle = self.idle.lock();
            let fitting = idle.iter().enumerate().filter(|(_, buffers)| buffers.host.len() >= len);
            if let Some((at, _)) = fitting.min_by_key(|(_, buffers)| buffers.host.len()) {
                return Ok(idle.swap_remove(at));
            }
            idle.pop(); // too small for the batches of now
        }
        let context = self.stream.context();
        // SAFETY: the bytes of the host are written below, those of the GPU by the copy of `start` before anything reads them.
        let (host, gpu) = unsafe { (context.alloc_pinned(len), self.stream.alloc(len)) };
        let (mut host, gpu) = (host.map_err(driver)?, gpu.map_err(driver)?);
        // The gaps between tensors are copied, too.
        host.as_mut_slice().map_err(driver)?.fill(0);
        Ok(StagingBuffers { host, gpu, copied: None })
    }

    /// Starts to copy contiguous tensors of the host.
    pub(super) fn start(self: &Arc<Self>, tensors: &[Tensor]) -> Result<Upload> {
        let mut parts = Vec::new();
        let mut len = 0;
        for t in tensors {
            parts.push(CopyPart { start: len, shape: t.shape().clone(), dtype: t.dtype() });
            len += bytes_of(t.shape(), t.dtype()).next_multiple_of(ALIGNMENT);
        }
        let mut buffers = self.buffers(len)?;
        if let Some(copied) = buffers.copied.take() {
            copied.synchronize().map_err(driver)?;
        }
        let host = buffers.host.as_mut_slice().map_err(driver)?;
        for (part, t) in parts.iter().zip(tensors) {
            with_bytes(t, |bytes| host[part.start..part.start + bytes.len()].copy_from_slice(bytes))?;
        }
        let StagingBuffers { host, gpu, copied } = &mut buffers;
        let host = &host.as_slice().map_err(driver)?[..len];
        let started = {
            let (to, _written) = gpu.device_ptr_mut(&self.stream);
            // SAFETY: both ends have `len` bytes. They are neither written, read nor freed before `copied`, recorded below.
            unsafe { result::memcpy_htod_async(to, host, self.stream.cu_stream()) }
        };
        // Also behind a copy that was refused: a part of it may run.
        *copied = match self.stream.record_event(None) {
            Ok(event) => Some(event),
            Err(error) => {
                let _ = self.stream.synchronize();
                return Err(driver(error));
            }
        };
        started.map_err(driver)?;
        Ok(Upload { side: self.clone(), buffers: Some(buffers), parts })
    }
}

/// Where a tensor is in the memory of a copy.
struct CopyPart {
    start: usize,
    shape: Shape,
    dtype: DType,
}

/// Tensors on their way to the GPU.
pub(super) struct Upload {
    side: Arc<CopyEngine>,
    /// Until it is dropped.
    buffers: Option<StagingBuffers>,
    parts: Vec<CopyPart>,
}

impl Upload {
    fn copied(&self) -> Option<&CudaEvent> {
        self.buffers.as_ref().and_then(|buffers| buffers.copied.as_ref())
    }

    pub(super) fn is_ready(&self) -> Result<bool> {
        self.copied().map_or(Ok(true), |copied| copied.try_is_complete().map_err(driver))
    }

    /// Returns the tensors in memory of the stream of the computation, which waits for them.
    pub(super) fn land(self) -> Result<Vec<Tensor>> {
        let Some(StagingBuffers { gpu, .. }) = &self.buffers else { return Ok(Vec::new()) };
        let main = self.side.device.cuda_stream();
        main.context().bind_to_thread().map_err(driver)?;
        self.copied().map_or(Ok(()), |copied| main.wait(copied)).map_err(driver)?;
        let take = |part: &CopyPart| -> Result<Tensor> {
            let mut storage = memory(&self.side.device, part.shape.elem_count(), part.dtype)?;
            let bytes = bytes_of(&part.shape, part.dtype);
            let (from, _read) = gpu.device_ptr(&main);
            // SAFETY: both ranges are inside of memory of this GPU: a part of the buffer, and a new storage of this
            // many bytes. The side stream waits below before the buffer is written or freed.
            let copy = unsafe {
                result::memcpy_dtod_async(
                    address(&storage, 0),
                    from + part.start as u64,
                    bytes,
                    main.cu_stream(),
                )
            };
            copy.map_err(driver)?;
            written(&mut storage);
            Ok(Fresh { storage: Storage::Cuda(storage), shape: part.shape.clone() }.into_tensor())
        };
        let taken: Result<Vec<Tensor>> = self.parts.iter().map(take).collect();
        let left = main.record_event(None).and_then(|left| self.side.stream.wait(&left));
        left.map_err(driver)?;
        taken
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        self.side.idle.lock().extend(self.buffers.take());
    }
}
