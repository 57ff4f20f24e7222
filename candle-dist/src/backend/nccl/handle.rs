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

    fn to_bytes(self) -> impl Iterator<Item = u8> {
        self.0.internal.into_iter().map(|c| c as u8)
    }

    fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let internal = bytes.iter().map(|&byte| byte as c_char).collect::<Vec<_>>().try_into().ok()?;
        Some(Self(sys::ncclUniqueId { internal }))
    }
}

/// What the first member of a communicator decides for all: the id, and the limit on thread blocks, which must be equal on all.
#[derive(Clone, Copy)]
pub(super) struct CommTerms {
    pub(super) id: UniqueId,
    pub(super) ctas: Option<u32>,
}

impl CommTerms {
    pub(super) fn to_bytes(self) -> Vec<u8> {
        self.id.to_bytes().chain(self.ctas.unwrap_or(0).to_le_bytes()).collect()
    }

    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (id, &ctas) = bytes.split_last_chunk()?;
        Some(Self {
            id: UniqueId::from_bytes(id)?,
            ctas: Some(u32::from_le_bytes(ctas)).filter(|&ctas| ctas > 0),
        })
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
pub(super) fn async_state(handle: Option<&Handle>) -> sys::ncclResult_t {
    let Some(Handle(raw)) = handle else { return sys::ncclResult_t::ncclInternalError };
    let mut state = sys::ncclResult_t::ncclSuccess;
    // SAFETY: the handle is alive while it is present, and the state is valid memory.
    let code = unsafe { sys::ncclCommGetAsyncError(*raw, &mut state) };
    if is_fine(code) { state } else { code }
}

/// Aborts a communicator with its running calls. May wait for the GPU.
pub(super) fn abort(Handle(raw): Handle) {
    // SAFETY: the handle is alive and is not used afterwards.
    let _ = unsafe { sys::ncclCommAbort(raw) };
}

/// Starts to end a communicator whose calls have ended. Returns its state.
pub(super) fn finalize(Handle(raw): &Handle) -> sys::ncclResult_t {
    // SAFETY: the handle is alive.
    unsafe { sys::ncclCommFinalize(*raw) }
}

/// Frees a communicator. Waits for the GPU, and among threads for the GPUs of the others.
pub(super) fn destroy(Handle(raw): Handle) {
    // SAFETY: the handle is alive and is not used afterwards. An error is ignored.
    let _ = unsafe { sys::ncclCommDestroy(raw) };
}

/// Returns NCCL's default configuration, with nonblocking calls, and with at most `ctas` thread blocks for a kernel.
pub(super) fn unblocking(ctas: Option<u32>) -> sys::ncclConfig_t {
    const UNSET: i32 = i32::MIN;
    let most = ctas.and_then(|ctas| i32::try_from(ctas).ok()).unwrap_or(UNSET);
    sys::ncclConfig_t {
        size: size_of::<sys::ncclConfig_t>(),
        magic: 0xcafe_beef,
        version: 23000,
        blocking: 0,
        cgaClusterSize: UNSET,
        minCTAs: UNSET,
        maxCTAs: most,
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_member_decides_for_all() {
        let id = UniqueId(sys::ncclUniqueId { internal: std::array::from_fn(|at| at as c_char) });
        for ctas in [None, Some(4)] {
            let found = CommTerms::from_bytes(&CommTerms { id, ctas }.to_bytes()).expect("terms");
            assert_eq!((found.id.0.internal, found.ctas), (id.0.internal, ctas));
            assert_eq!(unblocking(ctas).maxCTAs, ctas.map_or(i32::MIN, |ctas| ctas as i32));
        }
        assert!(CommTerms::from_bytes(&[0; 128]).is_none() && CommTerms::from_bytes(&[]).is_none());
    }
}
