//! Memory of messages that were sent, for messages that come.
//!
//! Memory for a message has to be zeroed before it may be handed out, which costs as much as the message where another
//! core has read it since. Ranks mostly receive as much as they send, so what was sent serves as it is.
use super::request;
use bytemuck::Zeroable;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, WithDType};
use std::collections::VecDeque;

/// The most bytes that are kept.
const MOST: usize = 64 << 20;

/// The most buffers that are kept: each that comes is looked for among them.
const COUNT: usize = 64;

/// Buffers that nobody uses, the oldest first.
#[derive(Default)]
pub(super) struct Spares {
    kept: VecDeque<CpuStorage>,
    bytes: usize,
}

/// The bytes of all elements.
fn bytes(buffer: &CpuStorage) -> usize {
    request::len(buffer).map_or(0, |len| len * buffer.dtype().size_in_bytes())
}

impl Spares {
    /// Keeps a buffer for later if it is not too large, and lets the oldest ones go for it.
    pub(super) fn keep(&mut self, buffer: CpuStorage) {
        if bytes(&buffer) > MOST {
            return;
        }
        self.bytes += bytes(&buffer);
        self.kept.push_back(buffer);
        while self.bytes > MOST || self.kept.len() > COUNT {
            self.bytes -= self.kept.pop_front().as_ref().map_or(self.bytes, bytes);
        }
    }

    /// A buffer of `len` elements of whatever values: one that was kept, or zeros.
    pub(super) fn take<T: WithDType + Zeroable>(&mut self, len: usize) -> Vec<T> {
        let fits = |buffer: &CpuStorage| buffer.dtype() == T::DTYPE && request::len(buffer).is_ok_and(|n| n == len);
        let found = self.kept.iter().rposition(fits).and_then(|at| self.kept.remove(at));
        self.bytes -= found.as_ref().map_or(0, bytes);
        found.and_then(|buffer| T::cpu_storage_data(buffer).ok()).unwrap_or_else(|| vec![T::zeroed(); len])
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_kept_comes_back_once_for_its_length_and_dtype() {
        let mut spares = Spares::default();
        spares.keep(CpuStorage::F32(vec![1.0; 3]));
        spares.keep(CpuStorage::U32(vec![2; 3]));
        assert_eq!(spares.take::<f32>(4), [0.0; 4]);
        assert_eq!(spares.take::<f32>(3), [1.0; 3]);
        assert_eq!(spares.take::<f32>(3), [0.0; 3]);
        assert_eq!((spares.take::<u32>(3), spares.bytes), (vec![2; 3], 0));
    }

    #[test]
    fn no_more_is_kept_than_the_limit_and_the_oldest_goes_first() {
        let mut spares = Spares::default();
        for (value, len) in [(1, MOST / 2), (2, MOST / 2), (3, 4), (4, MOST + 1)] {
            spares.keep(CpuStorage::U8(vec![value; len]));
        }
        assert_eq!(spares.bytes, MOST / 2 + 4);
        assert_eq!((spares.take::<u8>(MOST / 2)[0], spares.take::<u8>(MOST / 2)[0]), (2, 0));
        assert_eq!((spares.take::<u8>(4), spares.take::<u8>(MOST + 1)[0]), (vec![3; 4], 0));
    }
}
