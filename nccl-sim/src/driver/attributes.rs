//! Attributes of memory pools, and the priorities of streams.
use super::{code, device::device, enter, status};
use crate::abi::put;
use crate::engine::lock;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::ffi::{c_int, c_void};

/// `CUmemPool_attribute`.
const RELEASE_THRESHOLD: c_int = 4;
const USED_MEM_CURRENT: c_int = 7;

/// Pools have handles from here on.
const POOLS: u64 = 0x9000;

/// How much free memory the pools keep when a stream, an event or a context is waited for. "cuMemPoolSetAttribute": 0 by default.
static THRESHOLDS: Mutex<Option<HashMap<usize, u64>>> = Mutex::new(None);

fn owner(pool: u64) -> Result<usize, i32> {
    let owner = pool.checked_sub(POOLS).and_then(|owner| c_int::try_from(owner).ok());
    owner.ok_or(code::INVALID_VALUE).and_then(device)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemPoolSetAttribute(pool: u64, attribute: c_int, value: *const c_void) -> c_int {
    status(owner(pool).and_then(|owner| {
        let value = crate::abi::array(value.cast::<u64>(), 1);
        match (attribute, value.first()) {
            (RELEASE_THRESHOLD, Some(&bytes)) => {
                THRESHOLDS.lock().get_or_insert_default().insert(owner, bytes);
                Ok(())
            }
            _ => Err(code::INVALID_VALUE),
        }
    }))
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemPoolGetAttribute(pool: u64, attribute: c_int, value: *mut c_void) -> c_int {
    status(owner(pool).and_then(|owner| {
        let found = match attribute {
            RELEASE_THRESHOLD => {
                THRESHOLDS.lock().as_ref().and_then(|all| all.get(&owner).copied()).unwrap_or(0)
            }
            USED_MEM_CURRENT => lock().memory.used(owner) as u64,
            _ => return Err(code::INVALID_VALUE),
        };
        put(value.cast::<u64>(), found);
        Ok(())
    }))
}

// "cuCtxGetStreamPriorityRange": the least and the greatest; smaller numbers come first.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuCtxGetStreamPriorityRange(least: *mut c_int, greatest: *mut c_int) -> c_int {
    status(enter("cuCtxGetStreamPriorityRange").map(|_| {
        put(least, 0);
        put(greatest, -5);
    }))
}
