//! The default memory pools of devices, and which other devices may access them.
use super::{code, device::device, status};
use crate::abi::{array, put};
use crate::engine::lock;
use std::ffi::{c_int, c_void};

/// `CUmemAccessDesc`, whose location is of this kind and number.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct Access {
    pub(crate) kind: c_int,
    pub(crate) device: c_int,
    pub(crate) flags: c_int,
}

/// `CU_MEM_LOCATION_TYPE_DEVICE` and `CU_MEM_ACCESS_FLAGS_PROT_READWRITE`.
pub(crate) const DEVICE: c_int = 1;
pub(crate) const READ_AND_WRITE: c_int = 3;

/// Pools have handles from here on.
const POOLS: u64 = 0x9000;

/// Returns the device of a pool.
fn owner(pool: u64) -> Option<usize> {
    let owner = pool.checked_sub(POOLS).and_then(|owner| c_int::try_from(owner).ok())?;
    device(owner).ok()
}

/// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD`, `.._RESERVED_MEM_CURRENT` and `.._USED_MEM_CURRENT`.
pub(crate) const RELEASE_THRESHOLD: c_int = 4;
pub(crate) const RESERVED_NOW: c_int = 5;
pub(crate) const USED_NOW: c_int = 7;

// "cuMemPoolSetAttribute". Nothing is modeled of how a pool gives memory back, so the threshold is only kept.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemPoolSetAttribute(pool: u64, attribute: c_int, value: *const c_void) -> c_int {
    match (owner(pool), crate::abi::with(value.cast::<u64>(), |&value| value)) {
        (Some(owner), Some(value)) if attribute == RELEASE_THRESHOLD => {
            lock().thresholds.insert(owner, value);
            code::SUCCESS
        }
        _ => code::INVALID_VALUE,
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemPoolGetAttribute(pool: u64, attribute: c_int, to: *mut c_void) -> c_int {
    let Some(owner) = owner(pool) else { return code::INVALID_VALUE };
    let sim = lock();
    let value = match attribute {
        RELEASE_THRESHOLD => sim.thresholds.get(&owner).copied().unwrap_or(0),
        RESERVED_NOW | USED_NOW => sim.memory.used(owner) as u64,
        _ => return code::INVALID_VALUE,
    };
    put(to.cast::<u64>(), value);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceGetDefaultMemPool(to: *mut u64, ordinal: c_int) -> c_int {
    status(device(ordinal).map(|device| put(to, POOLS + device as u64)))
}

// "Peer Context Memory Access". All simulated devices are linked.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuDeviceCanAccessPeer(to: *mut c_int, ordinal: c_int, peer: c_int) -> c_int {
    let both = device(ordinal).and_then(|ordinal| Ok((ordinal, device(peer)?)));
    status(both.map(|(ordinal, peer)| put(to, c_int::from(ordinal != peer))))
}

// "cuMemPoolSetAccess": by default a pool is accessible from its own device only.
#[unsafe(no_mangle)]
pub(crate) extern "C" fn cuMemPoolSetAccess(pool: u64, map: *const Access, count: usize) -> c_int {
    let Some(owner) = owner(pool) else { return code::INVALID_VALUE };
    for Access { kind, device: ordinal, flags } in array(map, count) {
        match device(ordinal) {
            Ok(other) if kind == DEVICE && flags == READ_AND_WRITE => lock().memory.allow(owner, other),
            _ => return code::INVALID_VALUE,
        }
    }
    code::SUCCESS
}
