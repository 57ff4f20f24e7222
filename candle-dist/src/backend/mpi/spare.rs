//! Memory of messages that were sent, for messages that come.
//!
//! Memory for a message has to be zeroed before it may be handed out, which costs as much as the message where another
//! core has read it since. Ranks mostly receive as much as they send, so what was sent serves as it is.
use bytemuck::Zeroable;
use candle_core::backend::BackendStorage;
use candle_core::{CpuStorage, DType, WithDType};
use std::collections::VecDeque;

/// The most bytes that are kept.
const MOST: usize = 64 << 20;

/// Buffers that nobody uses, the oldest first.
#[derive(Default)]
pub(super) struct Spares {
    kept: VecDeque<CpuStorage>,
    bytes: usize,
}

/// The bytes of all elements.
fn bytes(buffer: &CpuStorage) -> usize {
    super::request::len(buffer).map_or(0, |len| len * buffer.dtype().size_in_bytes())
}

impl Spares {
    /// Keeps a buffer for later, and lets the oldest ones go for it.
    pub(super) fn keep(&mut self, buffer: CpuStorage) {
        self.bytes += bytes(&buffer);
        self.kept.push_back(buffer);
        while self.bytes > MOST {
            self.bytes -= self.kept.pop_front().as_ref().map_or(self.bytes, bytes);
        }
    }

    /// A buffer of `len` elements of whatever values: one that was kept, or zeros.
    pub(super) fn take<T: WithDType + Zeroable>(&mut self, len: usize) -> Vec<T> {
        let fits =
            |buffer: &CpuStorage| buffer.dtype() == T::DTYPE && super::request::len(buffer).is_ok_and(|n| n == len);
        let found = self.kept.iter().rposition(fits).and_then(|at| self.kept.remove(at));
        self.bytes -= found.as_ref().map_or(0, bytes);
        found.and_then(|buffer| T::cpu_storage_data(buffer).ok()).unwrap_or_else(|| vec![T::zeroed(); len])
    }
}
