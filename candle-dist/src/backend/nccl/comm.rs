//! A nonblocking communicator, which is polled against a deadline and aborted on failure.
use super::errors::explain;
use super::handle::{Handle, UniqueId, abort, async_state, is_fine, name_of, unblocking};
use super::rank::{NcclRank, PollPause};
use crate::backend::cuda::driver;
use crate::{Error, Result};
use cudarc::driver::{CudaEvent, CudaStream};
use cudarc::nccl::sys;
use parking_lot::Mutex;
use std::collections::VecDeque;
use std::ffi::CStr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long NCCL may take to finalize an idle communicator.
const FAREWELL: Duration = Duration::from_secs(10);

/// A call that the GPU may not have finished.
struct IssuedCall {
    done: Arc<CudaEvent>,
    number: u64,
    since: Instant,
}

/// How long a call may wait for other ranks.
pub(super) enum Limit {
    /// For the timeout of the world, which then ends.
    Timeout,
    /// Until the receiver takes it. After the sender has closed its end, for the timeout, or until the receiver has
    /// returned without it; the message is then dropped. Nobody waits in a send, so the world goes on.
    Send(Arc<LaneStatus>),
}

/// What the ends of a lane know about its messages.
pub(super) struct LaneStatus {
    pub(super) channel: u64,
    /// The receiver, as a rank of the world.
    pub(super) to: usize,
    /// When the sender has closed its end.
    pub(super) closed: OnceLock<Instant>,
    /// Whether messages were dropped, because nobody will receive them.
    pub(super) dropped: AtomicBool,
}

impl LaneStatus {
    pub(super) fn new(channel: u64, to: usize) -> Arc<Self> {
        Arc::new(Self { channel, to, closed: OnceLock::new(), dropped: AtomicBool::new(false) })
    }
}

/// A communicator of this rank with others. Its end waits for calls that other ranks may need.
pub(super) struct NcclComm(Arc<CommState>);

/// What the watchdog sees of a communicator. The watchdog may drop the last reference, which waits for nothing.
pub(super) struct CommState {
    rank: Arc<NcclRank>,
    limit: Limit,
    /// The stream of the calls, which nothing else uses: NCCL enqueues on a thread of its own, and until it is done
    /// nothing may be put on the stream. Calls of different communicators do not wait for each other.
    stream: Arc<CudaStream>,
    /// `None` after an abort.
    handle: Mutex<Option<Handle>>,
    /// The calls that the GPU has not finished, oldest first.
    issued: Mutex<VecDeque<IssuedCall>>,
    /// How many calls were made. Those of a lane are its messages.
    made: AtomicU64,
}

impl CommState {
    /// Joins the communicator `id` of `size` members as the `me`-th. Returns when all have joined.
    fn connect(rank: &Arc<NcclRank>, id: UniqueId, size: usize, me: usize, limit: Limit) -> Result<NcclComm> {
        rank.bind()?;
        let stream = rank.device.cuda_stream().context().new_stream().map_err(driver)?;
        let (mut raw, mut config) = (std::ptr::null_mut(), unblocking());
        // SAFETY: NCCL writes the handle to valid memory and reads the configuration, both alive during the call.
        let code =
            unsafe { sys::ncclCommInitRankConfig(&mut raw, size as i32, id.0, me as i32, &mut config) };
        let handle = (!raw.is_null()).then_some(Handle(raw));
        let (handle, issued, made) = (Mutex::new(handle), Mutex::default(), AtomicU64::new(0));
        let comm = NcclComm(Arc::new(Self { rank: rank.clone(), limit, stream, handle, issued, made }));
        comm.0.settle(&mut comm.0.handle.lock(), "init", code, 0)?;
        Ok(comm)
    }

    /// Enqueues the NCCL calls of `enqueue` as one group after all work on the streams `after`, and returns while they
    /// run. The event marks their end.
    ///
    /// The memory that they use must stay unchanged until then. Threads may call this concurrently, each on its rank's
    /// communicators, without a common lock: NCCL has one group per thread.
    fn issue(
        &self,
        op: &str,
        after: &[Arc<CudaStream>],
        enqueue: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
    ) -> Result<Arc<CudaEvent>> {
        self.rank.bind()?;
        // Held until the end is marked, so that no other call enqueues in between.
        let mut handle = self.handle.lock();
        let Some(Handle(raw)) = *handle else { return Err(self.stopped()) };
        after.iter().try_for_each(|earlier| self.stream.join(earlier)).map_err(driver)?;
        let number = self.made.fetch_add(1, Ordering::Relaxed);
        // SAFETY: groups belong to the calling thread, and this one ends three lines below.
        let begun = unsafe { sys::ncclGroupStart() };
        let code = if is_fine(begun) { enqueue(raw, self.stream.cu_stream().cast()) } else { begun };
        // SAFETY: as above. A group that began must end, even if one of its calls was refused.
        let ended = unsafe { sys::ncclGroupEnd() };
        let settled = self.settle(&mut handle, op, if is_fine(code) { ended } else { code }, number);
        let done = Arc::new(self.stream.record_event(None).map_err(driver)?);
        drop(handle);
        if let Err(error) = settled {
            // A part of the group may still run, and its memory is freed on these streams.
            after.iter().try_for_each(|stream| stream.wait(&done)).map_err(driver)?;
            return Err(error);
        }
        self.oldest(); // removes finished calls
        self.issued.lock().push_back(IssuedCall { done: done.clone(), number, since: Instant::now() });
        Ok(done)
    }

    /// Waits until NCCL has finished the host's part of the call `number`, which returned `code`. Aborts if it cannot.
    fn settle(
        &self,
        handle: &mut Option<Handle>,
        op: &str,
        code: sys::ncclResult_t,
        number: u64,
    ) -> Result<()> {
        let (began, mut patience) = (Instant::now(), PollPause::default());
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
            if self.is_over(began, number) {
                break self.expire();
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
        if let Limit::Send(sending) = &self.limit
            && sending.dropped.load(Ordering::Relaxed)
        {
            return self.expire(); // the messages after a dropped one are dropped too
        }
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
            self.expire();
            abort(&mut handle);
        }
        if self.rank.watch.failure().is_some() {
            abort(&mut handle);
        }
    }

    fn is_overdue(&self) -> bool {
        self.oldest().is_some_and(|(since, number)| self.is_over(since, number))
    }

    /// Returns whether the call `number`, which began then, waits too long.
    fn is_over(&self, since: Instant, number: u64) -> bool {
        let timeout = self.rank.watch.timeout();
        match &self.limit {
            Limit::Timeout => since.elapsed() >= timeout,
            Limit::Send(sending) => {
                // Earlier messages, which may be received already, would end with it.
                let is_oldest = || self.oldest().is_none_or(|(_, oldest)| oldest >= number);
                let has_left =
                    || is_oldest() && self.rank.watch.has_left(sending.to, sending.channel, number);
                sending.closed.get().is_some_and(|at| at.elapsed() >= timeout || has_left())
            }
        }
    }

    /// Returns the error of a call that waits too long, which ends the world unless it is a send.
    fn expire(&self) -> Error {
        match &self.limit {
            Limit::Timeout => self.rank.watch.time_out(),
            Limit::Send(sending) => {
                sending.dropped.store(true, Ordering::Relaxed);
                Error::Unsupported(format!("a message that rank {} has not received", sending.to))
            }
        }
    }

    /// Returns when the oldest unfinished call was issued, and its number, if there is one.
    fn oldest(&self) -> Option<(Instant, u64)> {
        let mut issued = self.issued.lock();
        // A GPU that reports an error will not finish its calls.
        while issued.front().is_some_and(|issued| !matches!(issued.done.try_is_complete(), Ok(false))) {
            issued.pop_front();
        }
        issued.front().map(|issued| (issued.since, issued.number))
    }

    /// Waits until all calls have ended. Returns whether they have; else the world has failed, or one takes too long.
    pub(super) fn is_settled(&self) -> bool {
        let mut patience = PollPause::default();
        while self.oldest().is_some() {
            if self.rank.watch.failure().is_some() || self.is_overdue() {
                return false;
            }
            patience.pause();
        }
        true
    }

    /// Waits for calls that other ranks may need, then finalizes the communicator. Returns whether this worked.
    fn say_goodbye(&self, handle: &Option<Handle>) -> bool {
        let Some(Handle(raw)) = *handle else { return false };
        if std::thread::panicking() || self.rank.bind().is_err() || !self.is_settled() {
            return false;
        }
        let mut patience = PollPause::default();
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

impl NcclComm {
    /// Joins the communicator `id` of `size` members as the `me`-th. Returns when all have joined.
    pub(super) fn connect(
        rank: &Arc<NcclRank>,
        id: UniqueId,
        size: usize,
        me: usize,
        limit: Limit,
    ) -> Result<Self> {
        CommState::connect(rank, id, size, me, limit)
    }

    /// Returns what the watchdog sees.
    pub(super) fn line(&self) -> &Arc<CommState> {
        &self.0
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
        self.0.issue(op, after, enqueue)
    }

    /// Waits on the host until the GPU has reached `event`, the end of the call `number`. Returns whether it has, or may
    /// never.
    pub(super) fn arrives(&self, event: &CudaEvent, number: u64) -> Result<bool> {
        let (began, mut patience) = (Instant::now(), PollPause::default());
        while !event.try_is_complete().map_err(driver)? {
            self.0.rank.watch.check()?;
            if self.0.is_over(began, number) {
                return Ok(false);
            }
            patience.pause();
        }
        Ok(true)
    }
}

impl Drop for NcclComm {
    fn drop(&mut self) {
        let mut handle = self.0.handle.lock().take();
        if !self.0.say_goodbye(&handle) {
            return abort(&mut handle);
        }
        if let Some(Handle(raw)) = handle {
            // SAFETY: the handle is alive and finalized, and this is its only owner. An error is ignored.
            let _ = unsafe { sys::ncclCommDestroy(raw) };
        }
    }
}
