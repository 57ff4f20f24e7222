//! Memory that messages and reductions fill, and that then becomes a tensor.
//!
//! It is not zeroed first, since that would cost as much as the message. The plan says which elements are filled; its
//! test shows that every element of a result is written.
use crate::Result;
use crate::backend::element::with_element;
use candle_core::{CpuStorage, DType, WithDType};
use std::mem::ManuallyDrop;

/// Possibly uninitialized elements at an address that does not change.
pub(super) struct UninitBuffer {
    dtype: DType,
    data: *mut u8,
    len: usize,
    /// The capacity of the vector that this was and becomes again.
    capacity: usize,
}

// SAFETY: a room owns its memory alone.
unsafe impl Send for UninitBuffer {}

impl UninitBuffer {
    pub(super) fn new(dtype: DType, len: usize) -> Result<Self> {
        with_element!(dtype, T => {
            let mut data = ManuallyDrop::new(Vec::<T>::with_capacity(len));
            Ok(Self { dtype, data: data.as_mut_ptr().cast(), len, capacity: data.capacity() })
        })
    }

    pub(super) fn data(&self) -> *mut u8 {
        self.data
    }

    fn bytes(&self) -> usize {
        self.capacity * self.dtype.size_in_bytes()
    }

    /// The elements.
    ///
    /// # Safety
    /// All of them have been written, and the address is no longer used.
    #[allow(clippy::undocumented_unsafe_blocks)] // the comments are there, but the macro hides them
    pub(super) unsafe fn filled(self) -> Result<CpuStorage> {
        let room = ManuallyDrop::new(self);
        with_element!(room.dtype, T => {
            // SAFETY: address and capacity are those of such a vector; the caller has written the elements.
            let data = unsafe { Vec::from_raw_parts(room.data.cast::<T>(), room.len, room.capacity) };
            Ok(T::to_cpu_storage_owned(data))
        })
    }
}

impl Drop for UninitBuffer {
    #[allow(clippy::undocumented_unsafe_blocks)] // the comments are there, but the macro hides them
    fn drop(&mut self) {
        let freed: Result<()> = with_element!(self.dtype, T => {
            // SAFETY: address and capacity are those of such a vector; its length is zero, so no element is read.
            drop(unsafe { Vec::from_raw_parts(self.data.cast::<T>(), 0, self.capacity) });
            Ok(())
        });
        debug_assert!(freed.is_ok(), "it was made with this dtype");
    }
}

/// The most bytes of rooms that are kept for reuse.
const MOST: usize = 64 << 20;
/// The most rooms that are kept for reuse.
const COUNT: usize = 8;

/// Free rooms, the oldest first: memory that was used before causes no page faults.
#[derive(Default)]
pub(super) struct SpareBuffers(Vec<UninitBuffer>);

impl SpareBuffers {
    /// Keeps a room for reuse if it is not too large, and frees the oldest ones for it.
    pub(super) fn keep(&mut self, room: UninitBuffer) {
        if room.bytes() > MOST || room.bytes() == 0 {
            return;
        }
        self.0.push(room);
        while self.0.len() > COUNT || self.0.iter().map(UninitBuffer::bytes).sum::<usize>() > MOST {
            self.0.remove(0);
        }
    }

    /// Returns a room for `len` elements: a kept one that is less than twice as large, or a new one.
    pub(super) fn take(&mut self, dtype: DType, len: usize) -> Result<UninitBuffer> {
        let fits = |room: &UninitBuffer| room.dtype == dtype && (len..=2 * len).contains(&room.capacity);
        match self.0.iter().rposition(fits) {
            Some(at) => {
                let mut room = self.0.remove(at);
                room.len = len;
                Ok(room)
            }
            None => UninitBuffer::new(dtype, len),
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)] // a panic is how a test fails
mod tests {
    use super::*;
    use crate::call::CARRIED;

    #[test]
    fn what_was_written_is_there_in_every_dtype() {
        for dtype in CARRIED {
            let room = UninitBuffer::new(dtype, 5).unwrap();
            // SAFETY: the room has 5 elements; zero bytes are a value of each dtype.
            let filled = unsafe {
                room.data().write_bytes(0, 5 * dtype.size_in_bytes());
                room.filled().unwrap()
            };
            let shown = candle_core::Tensor::from_storage(
                candle_core::Storage::Cpu(filled),
                5,
                candle_core::op::BackpropOp::none(),
                false,
            );
            // candle's conversion of f8 to f64 calls itself for ever; all of these numbers are exact in f32.
            assert_eq!(shown.to_dtype(DType::F32).unwrap().to_vec1::<f32>().unwrap(), [0.0; 5], "{dtype:?}");
        }
    }

    #[test]
    fn rooms_are_used_again_by_those_that_they_fit() {
        let mut spares = SpareBuffers::default();
        let kept = spares.take(DType::F32, 100).unwrap();
        let address = kept.data();
        spares.keep(kept);
        assert_ne!(spares.take(DType::U32, 100).unwrap().data(), address, "another dtype");
        assert_ne!(spares.take(DType::F32, 10).unwrap().data(), address, "much less");
        assert_eq!(spares.take(DType::F32, 90).unwrap().data(), address);
        assert_ne!(spares.take(DType::F32, 90).unwrap().data(), address, "it is in use");
    }

    #[test]
    fn no_more_is_kept_than_the_limit() {
        let mut spares = SpareBuffers::default();
        for len in [MOST + 1, MOST / 2, MOST / 2, MOST / 4] {
            spares.keep(UninitBuffer::new(DType::U8, len).unwrap());
        }
        assert!(spares.0.iter().map(UninitBuffer::bytes).sum::<usize>() <= MOST);
        assert_eq!(spares.0.len(), 2);
    }
}
