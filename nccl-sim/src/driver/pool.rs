//! The default memory pools of devices, and which other devices may access them.
use super::{code, device::device, status};
use crate::abi::{array, put};
use crate::engine::lock;
use std::ffi::c_int;

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
    let owner = pool.checked_sub(POOLS).and_then(|owner| c_int::try_from(owner).ok());
    let Some(owner) = owner.and_then(|owner| device(owner).ok()) else { return code::INVALID_VALUE };
    for Access { kind, device: ordinal, flags } in array(map, count) {
        match device(ordinal) {
            Ok(other) if kind == DEVICE && flags == READ_AND_WRITE => lock().memory.allow(owner, other),
            _ => return code::INVALID_VALUE,
        }
    }
    code::SUCCESS
}
