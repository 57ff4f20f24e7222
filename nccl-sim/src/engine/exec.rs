//! An operation that runs: its access to memory.
use super::Effort;
use crate::memory::{Accessor, Memory};
use crate::report::Site;
use std::sync::Arc;

/// An operation that runs: its access to memory.
pub(crate) struct Exec<'a> {
    pub(super) memory: &'a mut Memory,
    pub(super) who: Accessor<'a>,
    pub(crate) device: usize,
    /// What the operation has done so far.
    pub(crate) effort: Effort,
}

impl Exec<'_> {
    /// Notes a read of bytes that [`peek`](Self::peek) then returns.
    pub(crate) fn note_read(&mut self, address: u64, len: usize) -> bool {
        self.effort.bytes += len;
        len == 0 || self.memory.note_read(address, len, self.device, &self.who)
    }

    pub(crate) fn peek(&mut self, address: u64, len: usize) -> Option<Vec<u8>> {
        if len == 0 {
            return Some(Vec::new());
        }
        self.memory.peek(address, len, self.device, &self.who).map(<[u8]>::to_vec)
    }

    pub(crate) fn read(&mut self, address: u64, len: usize) -> Option<Vec<u8>> {
        if self.note_read(address, len) { self.peek(address, len) } else { None }
    }

    pub(crate) fn write(&mut self, address: u64, data: &[u8]) {
        self.effort.bytes += data.len();
        if !data.is_empty() {
            self.memory.write(address, data.len(), Some(data), self.device, &self.who);
        }
    }

    /// Notes a write of bytes that are written already.
    pub(crate) fn note_write(&mut self, address: u64, len: usize) {
        self.effort.bytes += len;
        self.memory.note_write(address, len, self.device, &self.who);
    }

    /// The blocks that are allocated on the device.
    pub(crate) fn live(&self) -> Vec<(u64, usize)> {
        self.memory.live(self.device)
    }

    pub(crate) fn begin(&mut self, address: u64) {
        self.memory.begin(address, &self.who);
    }

    pub(crate) fn end(&mut self, address: u64) {
        self.memory.end(address, &self.who);
    }

    pub(crate) fn site(&self) -> &Arc<Site> {
        self.who.site
    }
}
