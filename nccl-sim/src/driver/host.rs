//! Page-locked memory of the host.
use super::{code, enter, status};
use crate::abi::{array, put};
use crate::clock::Mark;
use crate::engine::{lock, wait_for_device};
use crate::report::{Kind, Site, fault};
use parking_lot::Mutex;
use std::collections::BTreeMap;
use std::ffi::{c_int, c_uint, c_void};
use std::sync::Arc;

/// Memory of the host, and the copies that read it.
struct Block {
    words: Box<[u64]>,
    copies: Vec<(Arc<Site>, Mark)>,
}

/// The blocks by address.
static BLOCKS: Mutex<BTreeMap<usize, Block>> = Mutex::new(BTreeMap::new());

// "cuMemHostAlloc": the memory is not set.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemHostAlloc(to: *mut *mut c_void, len: usize, _flags: c_uint) -> c_int {
    status(enter("cuMemHostAlloc").and_then(|_| {
        if len == 0 {
            return Err(code::INVALID_VALUE);
        }
        let mut words = vec![u64::MAX; len.div_ceil(8)].into_boxed_slice();
        let address = words.as_mut_ptr();
        put(to, address.cast());
        BLOCKS.lock().insert(address.addr(), Block { words, copies: Vec::new() });
        Ok(())
    }))
}

// "cuMemFreeHost" waits for the device (NCCL issue 48). The copies that read the memory must have ended, and the host must know it.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemFreeHost(from: *mut c_void) -> c_int {
    status(enter("cuMemFreeHost").and_then(|(mut sim, device, free)| {
        let block = BLOCKS.lock().remove(&from.addr()).ok_or(code::INVALID_VALUE)?;
        for (site, _) in block.copies.iter().filter(|(_, mark)| !sim.has_seen(mark)) {
            fault(
                Kind::Race,
                site.call(),
                format!("{free} frees memory of the host that {site} may still read"),
            );
        }
        wait_for_device(&mut sim, device, &free);
        Ok(())
    }))
}

/// Notes a copy from page-locked memory.
pub(super) fn note(from: usize, site: Arc<Site>, mark: Mark) {
    let sim = lock();
    if let Some((_, block)) = BLOCKS.lock().range_mut(..=from).next_back() {
        block.copies.retain(|(_, mark)| !sim.has_seen(mark));
        block.copies.push((site, mark));
    }
}

/// Returns whether these bytes are page-locked.
pub(super) fn is_locked(from: *const c_void, len: usize) -> bool {
    let blocks = BLOCKS.lock();
    let before = blocks.range(..=from.addr()).next_back();
    before.is_some_and(|(start, block)| from.addr() + len <= start + size_of_val(&*block.words))
}

/// Reads page-locked memory as it is now; nothing if it was freed.
pub(super) fn read(from: *const c_void, len: usize) -> Option<Vec<u8>> {
    is_locked(from, len).then(|| array(from.cast::<u8>(), len))
}
