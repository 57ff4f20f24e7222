//! NCCL's handles: unique ids, communicators, and their states.
use crate::{Error, Result};
use cudarc::nccl::sys;
use std::ffi::{CStr, c_char};

/// The id that the members of a communicator share.
#[derive(Clone, Copy)]
pub(super) struct UniqueId(pub(super) sys::ncclUniqueId);

impl UniqueId {
    pub(super) fn new() -> Result<Self, String> {
        let mut id = sys::ncclUniqueId { internal: [0; 128] };
        // SAFETY: NCCL writes an id to valid memory of its size.
        let code = unsafe { sys::ncclGetUniqueId(&mut id) };
        if is_fine(code) { Ok(Self(id)) } else { Err(format!("NCCL makes no id: {}", name_of(code))) }
    }

    pub(super) fn to_bytes(self) -> Vec<u8> {
        self.0.internal.iter().map(|&c| c as u8).collect()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let internal = bytes.iter().map(|&byte| byte as c_char).collect::<Vec<_>>().try_into().ok()?;
        Some(Self(sys::ncclUniqueId { internal }))
    }
}

/// Returns the version of the loaded NCCL library, e.g. 23007 for 2.30.7.
///
/// # Errors
/// If the library reports one.
pub fn library_version() -> Result<i32> {
    let mut version = 0;
    // SAFETY: NCCL writes an integer to valid memory.
    let code = unsafe { sys::ncclGetVersion(&mut version) };
    if is_fine(code) { Ok(version) } else { Err(Error::Unsupported(format!("NCCL: {}", name_of(code)))) }
}

pub(super) fn is_fine(code: sys::ncclResult_t) -> bool {
    matches!(code, sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress)
}

pub(super) fn name_of(code: sys::ncclResult_t) -> String {
    // SAFETY: NCCL returns a static, zero-terminated string for any code.
    unsafe { CStr::from_ptr(sys::ncclGetErrorString(code)) }.to_string_lossy().into_owned()
}

/// NCCL's handle of a communicator.
pub(super) struct Handle(pub(super) sys::ncclComm_t);

// SAFETY: any thread may use a communicator, but only one at a time, which the lock around every handle ensures.
unsafe impl Send for Handle {}

/// Returns the state of a communicator: success, in progress, or its error.
pub(super) fn async_state(handle: &Option<Handle>) -> sys::ncclResult_t {
    let Some(Handle(raw)) = handle else { return sys::ncclResult_t::ncclInternalError };
    let mut state = sys::ncclResult_t::ncclSuccess;
    // SAFETY: the handle is alive while it is present, and the state is valid memory.
    let code = unsafe { sys::ncclCommGetAsyncError(*raw, &mut state) };
    if is_fine(code) { state } else { code }
}

/// Aborts a communicator at once, with its running calls.
pub(super) fn abort(handle: &mut Option<Handle>) {
    if let Some(Handle(raw)) = handle.take() {
        // SAFETY: the handle is alive and is not used afterwards.
        let _ = unsafe { sys::ncclCommAbort(raw) };
    }
}

/// Returns NCCL's default configuration, with nonblocking calls.
pub(super) fn unblocking() -> sys::ncclConfig_t {
    const UNSET: i32 = i32::MIN;
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 23000,
        blocking: 0,
        cgaClusterSize: UNSET,
        minCTAs: UNSET,
        maxCTAs: UNSET,
        netName: std::ptr::null(),
        splitShare: UNSET,
        trafficClass: UNSET,
        commName: std::ptr::null(),
        collnetEnable: UNSET,
        CTAPolicy: UNSET,
        shrinkShare: UNSET,
        nvlsCTAs: UNSET,
        nChannelsPerNetPeer: UNSET,
        nvlinkCentricSched: UNSET,
        graphUsageMode: UNSET,
        numRmaCtx: UNSET,
        maxP2pPeers: UNSET,
    }
}
