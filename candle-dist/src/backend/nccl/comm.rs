//! A nonblocking communicator, which is polled against a deadline and aborted on failure.
use super::errors::explain;
use super::rank::{Patience, Rank, cuda};
use crate::{Error, Result};
use cudarc::driver::{CudaEvent, CudaStream};
use cudarc::nccl::sys;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::ffi::{CStr, c_char};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long NCCL may take to finalize an idle communicator.
const FAREWELL: Duration = Duration::from_secs(10);

/// The id that the members of a communicator share.
#[derive(Clone, Copy)]
pub(super) struct UniqueId(sys::ncclUniqueId);

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

fn is_fine(code: sys::ncclResult_t) -> bool {
    matches!(code, sys::ncclResult_t::ncclSuccess | sys::ncclResult_t::ncclInProgress)
}

fn name_of(code: sys::ncclResult_t) -> String {
    // SAFETY: NCCL returns a static, zero-terminated string for any code.
    unsafe { CStr::from_ptr(sys::ncclGetErrorString(code)) }.to_string_lossy().into_owned()
}

/// NCCL's handle of a communicator.
struct Handle(sys::ncclComm_t);

// SAFETY: any thread may use a communicator, but only one at a time, which the lock around every handle ensures.
unsafe impl Send for Handle {}

/// A call that the GPU may not have finished.
struct Issued {
    done: Arc<CudaEvent>,
    since: Instant,
}

/// A communicator of this rank with others.
pub(super) struct Comm {
    rank: Arc<Rank>,
    /// The stream of the calls, which nothing else uses: NCCL enqueues on a thread of its own, and until it is done
    /// nothing may be put on the stream. Calls of different communicators do not wait for each other.
    stream: Arc<CudaStream>,
    /// `None` after an abort.
    handle: Mutex<Option<Handle>>,
    /// The calls that the GPU has not finished, oldest first.
    issued: Mutex<VecDeque<Issued>>,
}

impl Comm {
    /// Joins the communicator `id` of `size` members as the `me`-th. Returns when all have joined.
    pub(super) fn connect(rank: &Arc<Rank>, id: UniqueId, size: usize, me: usize) -> Result<Self> {
        rank.bind()?;
        let stream = rank.device.cuda_stream().context().new_stream().map_err(cuda)?;
        let (mut raw, mut config) = (std::ptr::null_mut(), unblocking());
        // SAFETY: NCCL writes the handle to valid memory and reads the configuration, both alive during the call.
        let code = unsafe { sys::ncclCommInitRankConfig(&mut raw, size as i32, id.0, me as i32, &mut config) };
        let handle = (!raw.is_null()).then_some(Handle(raw));
        let comm = Self { rank: rank.clone(), stream, handle: Mutex::new(handle), issued: Mutex::default() };
        let mut handle = comm.handle.lock();
        comm.settle(&mut handle, "init", code)?;
        drop(handle);
        Ok(comm)
    }

    /// Enqueues the NCCL calls of `enqueue` as one group after all work on the streams `after`, and returns while they
    /// run. The event marks their end.
    ///
    /// The memory that they use must stay unchanged until then. Threads may call this concurrently, each on its rank's
    /// communicators, without a common lock: NCCL has one group per thread.
    pub(super) fn issue(
        &self,
        op: &str,
        after: &[Arc<CudaStream>],
        enqueue: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
    ) -> Result<Arc<CudaEvent>> {
        self.rank.bind()?;
        // Held until the end is marked, so that no other call enqueues in between.
        let mut handle = self.handle.lock();
        let Some(Handle(raw)) = *handle else { return Err(self.stopped()) };
        after.iter().try_for_each(|earlier| self.stream.join(earlier)).map_err(cuda)?;
        // SAFETY: groups belong to the calling thread, and this one ends three lines below.
        let begun = unsafe { sys::ncclGroupStart() };
        let code = if is_fine(begun) { enqueue(raw, self.stream.cu_stream().cast()) } else { begun };
        // SAFETY: as above. A group that began must end, even if one of its calls was refused.
        let ended = unsafe { sys::ncclGroupEnd() };
        let settled = self.settle(&mut handle, op, if is_fine(code) { ended } else { code });
        let done = Arc::new(self.stream.record_event(None).map_err(cuda)?);
        drop(handle);
        if let Err(error) = settled {
            // A part of the group may still run, and its memory is freed on these streams.
            after.iter().try_for_each(|stream| stream.wait(&done)).map_err(cuda)?;
            return Err(error);
        }
        self.oldest(); // removes finished calls
        self.issued.lock().push_back(Issued { done: done.clone(), since: Instant::now() });
        Ok(done)
    }

    /// Waits until NCCL has finished the host's part of a call that returned `code`. Aborts if it cannot.
    fn settle(&self, handle: &mut Option<Handle>, op: &str, code: sys::ncclResult_t) -> Result<()> {
        let (began, mut patience) = (Instant::now(), Patience::default());
        let mut state = code;
        let error = loop {
            match state {
                sys::ncclResult_t::ncclSuccess => return Ok(()),
                sys::ncclResult_t::ncclInProgress => {}
                code => break self.rank.watch.fail_with(self.describe(handle, op, code)),
            }
            if let Err(error) = self.rank.watch.check() {
                break error;
            }
            if began.elapsed() >= self.rank.watch.timeout() {
                break self.rank.watch.time_out();
            }
            patience.pause();
            state = async_state(handle);
        };
        abort(handle);
        Err(error)
    }

    fn describe(&self, handle: &Option<Handle>, op: &str, code: sys::ncclResult_t) -> String {
        let raw = handle.as_ref().map_or(std::ptr::null_mut(), |handle| handle.0);
        // SAFETY: the handle is alive, or null, for which NCCL returns its last error. The string belongs to NCCL and
        // is copied while the lock excludes other calls.
        let detail = unsafe { sys::ncclGetLastError(raw) };
        let detail = match detail.is_null() {
            true => String::new(),
            // SAFETY: not null, and NCCL's strings are zero-terminated.
            false => unsafe { CStr::from_ptr(detail) }.to_string_lossy().into_owned(),
        };
        explain(op, self.rank.gpu(), &name_of(code), &detail)
    }

    /// Returns the error of an aborted communicator.
    fn stopped(&self) -> Error {
        let unknown = || self.rank.watch.fail_with("NCCL's communicator was aborted".to_string());
        self.rank.watch.failure().map_or_else(unknown, Error::Group)
    }

    /// Checks for errors and calls that take too long. Aborts if there are any, or if the world has failed.
    pub(super) fn inspect(&self) {
        // A thread that holds the lock polls by itself.
        let Some(mut handle) = self.handle.try_lock() else { return };
        if handle.is_none() || self.rank.bind().is_err() {
            return;
        }
        let state = async_state(&handle);
        if !is_fine(state) {
            let message = self.describe(&handle, "a call under way", state);
            self.rank.watch.fail_with(message);
        } else if self.is_overdue() {
            self.rank.watch.time_out();
        }
        if self.rank.watch.failure().is_some() {
            abort(&mut handle);
        }
    }

    fn is_overdue(&self) -> bool {
        self.oldest().is_some_and(|since| since.elapsed() >= self.rank.watch.timeout())
    }

    /// Returns when the oldest unfinished call was issued, if there is one.
    fn oldest(&self) -> Option<Instant> {
        let mut issued = self.issued.lock();
        // A GPU that reports an error will not finish its calls.
        while issued.front().is_some_and(|issued| !matches!(issued.done.try_is_complete(), Ok(false))) {
            issued.pop_front();
        }
        issued.front().map(|issued| issued.since)
    }

    /// Waits for calls that other ranks may need, then finalizes the communicator. Returns whether this worked.
    fn say_goodbye(&self, handle: &Option<Handle>) -> bool {
        let Some(Handle(raw)) = *handle else { return false };
        if std::thread::panicking() || self.rank.bind().is_err() {
            return false;
        }
        let mut patience = Patience::default();
        while self.oldest().is_some() {
            if self.rank.watch.failure().is_some() || self.is_overdue() {
                return false;
            }
            patience.pause();
        }
        // SAFETY: the handle is alive, and this is its only owner.
        let mut state = unsafe { sys::ncclCommFinalize(raw) };
        let began = Instant::now();
        while state == sys::ncclResult_t::ncclInProgress {
            if self.rank.watch.failure().is_some() || began.elapsed() >= FAREWELL {
                return false;
            }
            patience.pause();
            state = async_state(handle);
        }
        state == sys::ncclResult_t::ncclSuccess
    }
}

impl Drop for Comm {
    fn drop(&mut self) {
        let mut handle = self.handle.get_mut().take();
        if !self.say_goodbye(&handle) {
            return abort(&mut handle);
        }
        if let Some(Handle(raw)) = handle {
            // SAFETY: the handle is alive and finalized, and this is its only owner. An error is ignored.
            let _ = unsafe { sys::ncclCommDestroy(raw) };
        }
    }
}

/// Returns the state of a communicator: success, in progress, or its error.
fn async_state(handle: &Option<Handle>) -> sys::ncclResult_t {
    let Some(Handle(raw)) = handle else { return sys::ncclResult_t::ncclInternalError };
    let mut state = sys::ncclResult_t::ncclSuccess;
    // SAFETY: the handle is alive while it is present, and the state is valid memory.
    let code = unsafe { sys::ncclCommGetAsyncError(*raw, &mut state) };
    if is_fine(code) { state } else { code }
}

/// Aborts a communicator at once, with its running calls.
fn abort(handle: &mut Option<Handle>) {
    if let Some(Handle(raw)) = handle.take() {
        // SAFETY: the handle is alive and is not used afterwards.
        let _ = unsafe { sys::ncclCommAbort(raw) };
    }
}

/// Returns NCCL's default configuration, with nonblocking calls.
fn unblocking() -> sys::ncclConfig_t {
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
