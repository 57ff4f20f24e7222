//! A nonblocking communicator, which is polled against a deadline and aborted on failure.
use super::assemblies::{CallMember, CallTurn};
use super::errors::explain;
use super::handle::{CommTerms, Handle, abort, async_state, is_fine, name_of, unblocking};
use super::limit::{Limit, PriorWork};
use super::rank::{NcclRank, PollPause};
use crate::backend::cuda::driver;
use crate::{Error, Result};
use cudarc::driver::{CudaEvent, CudaStream};
use cudarc::nccl::sys;
use parking_lot::{Mutex, MutexGuard};
use rustc_hash::FxHashSet;
use std::collections::VecDeque;
use std::ffi::CStr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// How long a call keeps the other calls of its rank waiting. Only calls that connect to other ranks take longer.
const TURN: Duration = Duration::from_millis(20);

/// A call that the GPU may not have finished.
struct IssuedCall {
    done: Arc<CudaEvent>,
    number: u64,
    since: Instant,
}

/// The members of a communicator, as ranks of the world, and which of them this rank is.
#[derive(Clone, Copy)]
pub(super) struct CommMembers<'a> {
    /// Equal on all members, and unlike that of all other communicators.
    pub(super) name: u64,
    pub(super) ranks: &'a [usize],
    pub(super) me: usize,
}

/// A communicator of this rank with others. Its end waits for calls that other ranks may need.
pub(super) struct NcclComm(Arc<CommState>);

/// What the watchdog sees of a communicator. The watchdog may drop the last reference, which waits for nothing.
pub(super) struct CommState {
    rank: Arc<NcclRank>,
    name: u64,
    size: usize,
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
    /// The op of the latest call.
    latest: Mutex<&'static str>,
    /// The members with which this one has exchanged data directly: whether it has sent, and to or from whom.
    met: Mutex<FxHashSet<(bool, usize)>>,
    /// This member among those that it meets for calls, where GPUs have few queues or ranks share one.
    member: Option<CallMember>,
}

impl CommState {
    /// Joins a communicator. Returns when all have joined.
    fn connect(
        rank: &Arc<NcclRank>,
        members: CommMembers<'_>,
        terms: CommTerms,
        limit: Limit,
    ) -> Result<NcclComm> {
        rank.bind()?;
        let _calls = rank.parked.calls();
        let context = rank.device.cuda_stream().context().clone();
        let stream = context.new_stream_with_priority(rank.priority).map_err(driver)?;
        let (mut raw, mut config) = (std::ptr::null_mut(), unblocking(terms.ctas));
        let (size, me) = (members.ranks.len(), members.me);
        // SAFETY: NCCL writes the handle to valid memory and reads the configuration, both alive during the call.
        let code =
            unsafe { sys::ncclCommInitRankConfig(&mut raw, size as i32, terms.id.0, me as i32, &mut config) };
        let handle = (!raw.is_null()).then_some(Handle(raw));
        let (handle, issued, made) = (Mutex::new(handle), Mutex::default(), AtomicU64::new(0));
        let (rank, name, latest) = (rank.clone(), members.name, Mutex::new("init"));
        let (met, assemblies) = (Mutex::default(), rank.assemblies.as_ref().filter(|_| size > 1));
        let member = assemblies.map(|assemblies| assemblies.member(name, members.ranks, me));
        let comm =
            Arc::new(Self { rank, name, size, limit, stream, handle, issued, made, latest, met, member });
        let mut handle = comm.handle.lock();
        if let Err(error) = comm.settle(&mut handle, "init", code, 0, None) {
            comm.abort(handle);
            return Err(error);
        }
        drop(handle);
        Ok(NcclComm(comm))
    }

    pub(super) fn name(&self) -> u64 {
        self.name
    }

    /// Returns how many members are in this process.
    pub(super) fn members_here(&self) -> usize {
        if self.rank.watch.is_thread() { self.size } else { 1 }
    }

    /// Takes the handle of a communicator that nobody uses any more.
    pub(super) fn take(&self) -> Option<Handle> {
        // Freeing needs a current device.
        self.rank.bind().ok()?;
        self.handle.lock().take()
    }

    /// Enqueues the NCCL calls of `enqueue` as one group after the work `after`, and returns while they run. The event marks
    /// their end, which is put on the stream once `may_mark` says so. `number` is that of a message.
    ///
    /// The memory that they use must stay unchanged until then. The calls of a rank are enqueued one after the other, on
    /// whichever threads ("Thread Safety" in NCCL's User Guide); only one that connects lets others by.
    fn issue(
        &self,
        op: &'static str,
        after: &PriorWork,
        number: u64,
        enqueue: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
        mut may_mark: impl FnMut() -> bool,
    ) -> Result<Arc<CudaEvent>> {
        self.rank.bind()?;
        let turn = self.member.as_ref().map(|member| self.assemble(member, after, number)).transpose()?;
        let _calls = self.rank.parked.calls();
        // Held until the end is marked, so that no other call enqueues in between.
        let mut handle = self.handle.lock();
        let Some(Handle(raw)) = *handle else {
            drop(handle);
            return Err(self.stopped());
        };
        // Made before the calls, which must not run without it.
        let done = Arc::new(self.stream.context().new_event(None).map_err(driver)?);
        let lock = self.rank.turn.lock();
        after.events.iter().try_for_each(|earlier| self.stream.wait(earlier)).map_err(driver)?;
        *self.latest.lock() = op;
        // SAFETY: groups belong to the calling thread, and this one ends three lines below.
        let begun = unsafe { sys::ncclGroupStart() };
        let code = if is_fine(begun) { enqueue(raw, self.stream.cu_stream().cast()) } else { begun };
        // SAFETY: as above. A group that began must end, even if one of its calls was refused.
        let ended = unsafe { sys::ncclGroupEnd() };
        let code = if is_fine(code) { ended } else { code };
        let settled = self.settle(&mut handle, op, code, number, Some(lock));
        let here = turn.map(|turn| (turn.member, turn.call)); // its turn ends here
        let settled = settled.and_then(|()| {
            let are_all = || here.is_none_or(|(member, call)| member.may_mark(call));
            self.wait_to_mark(&handle, op, number, &mut || may_mark() && are_all())
        });
        let marked = settled.and_then(|()| {
            done.record(&self.stream).map_err(|error| self.rank.watch.fail_with(format!("{op}: {error}")))
        });
        if let Err(error) = marked {
            self.abort(handle);
            // A part of the group may have run, and its memory is freed on these streams.
            self.rank.wait_for_aborts();
            let is_marked = done.record(&self.stream).is_ok();
            for stream in &after.streams {
                if !is_marked || stream.wait(&done).is_err() {
                    // The kernels leave after an abort. A GPU that reports an error here runs nothing any more.
                    let _ = self.stream.synchronize();
                }
            }
            return Err(error);
        }
        drop(handle);
        self.oldest(); // removes finished calls
        self.issued.lock().push_back(IssuedCall { done: done.clone(), number, since: Instant::now() });
        Ok(done)
    }

    /// Waits until NCCL has finished the host's part of the call `number`, which returned `code`. If it cannot, the
    /// communicator must be aborted.
    fn settle(
        &self,
        handle: &mut Option<Handle>,
        op: &str,
        code: sys::ncclResult_t,
        number: u64,
        turn: Option<MutexGuard<'_, ()>>,
    ) -> Result<()> {
        let (began, mut patience) = (Instant::now(), PollPause::default());
        let (mut state, mut turn) = (code, turn);
        loop {
            match state {
                sys::ncclResult_t::ncclSuccess => return Ok(()),
                sys::ncclResult_t::ncclInProgress => {}
                code => return Err(self.rank.watch.fail_with(self.describe(handle, op, code))),
            }
            self.rank.watch.check()?;
            if self.is_over(began, number) {
                return Err(self.expire());
            }
            if began.elapsed() > TURN {
                drop(turn.take()); // it waits for other ranks, which may wait for another call of this one
            }
            patience.pause();
            state = async_state(handle.as_ref());
        }
    }

    /// Waits on the host until the end of the call `number` may be put on the stream. A mark waits at the head of its queue on the GPU, so
    /// that of a receive comes after its message is enqueued.
    fn wait_to_mark(
        &self,
        handle: &Option<Handle>,
        op: &str,
        number: u64,
        may_mark: &mut dyn FnMut() -> bool,
    ) -> Result<()> {
        self.wait_until(number, || {
            let state = if may_mark() { return Ok(true) } else { async_state(handle.as_ref()) };
            match is_fine(state) {
                true => Ok(false),
                false => Err(self.rank.watch.fail_with(self.describe(handle, op, state))),
            }
        })
    }

    /// Comes to the call `number`, and waits on the host until it begins, if another rank may enqueue it in another order: as long as a call
    /// or message of this rank is not enqueued. Other calls go ahead.
    fn assemble<'a>(&self, member: &'a CallMember, after: &PriorWork, number: u64) -> Result<CallTurn<'a>> {
        let events = after.events.clone();
        // A GPU that reports an error will not finish its work.
        let has_ended = move || events.iter().all(|event| !matches!(event.try_is_complete(), Ok(false)));
        let turn = member.turn(member.come(member.shares_gpu() || self.rank.has_pending(), has_ended));
        self.wait_until(number, || Ok(member.may_enqueue(turn.call)))?;
        Ok(turn)
    }

    /// Waits on the host for something before the call `number` can go on. `is_there` waits for it a little.
    fn wait_until(&self, number: u64, mut is_there: impl FnMut() -> Result<bool>) -> Result<()> {
        let began = Instant::now();
        while !is_there()? {
            self.rank.watch.check()?;
            if self.is_over(began, number) {
                return Err(self.expire());
            }
        }
        Ok(())
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

    /// Aborts the communicator on a thread of its own, without the lock.
    fn abort(&self, mut handle: MutexGuard<'_, Option<Handle>>) {
        let taken = handle.take();
        drop(handle);
        taken.into_iter().for_each(|handle| self.abort_taken(handle));
    }

    /// Aborts a communicator whose handle was taken, on a thread of its own.
    pub(super) fn abort_taken(&self, handle: Handle) {
        self.rank.abort(*self.latest.lock(), move || abort(handle));
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
        let Some(handle) = self.handle.try_lock() else { return };
        if handle.is_none() || self.rank.bind().is_err() {
            return;
        }
        let state = async_state(handle.as_ref());
        let is_overdue = is_fine(state) && self.is_overdue();
        if !is_fine(state) {
            let message = self.describe(&handle, "a call under way", state);
            self.rank.watch.fail_with(message);
        } else if is_overdue {
            self.expire();
        }
        if is_overdue || self.rank.watch.failure().is_some() {
            self.abort(handle);
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

    /// Returns whether no call is under way.
    pub(super) fn is_idle(&self) -> bool {
        self.oldest().is_none()
    }

    /// Waits until all calls have ended. Returns whether they have; else the world has failed, or one takes too long, which ends the
    /// world unless it is a send.
    pub(super) fn is_settled(&self) -> bool {
        let mut patience = PollPause::default();
        while !self.is_idle() {
            if self.rank.watch.failure().is_some() {
                return false;
            }
            if self.is_overdue() {
                self.expire();
                return false;
            }
            patience.pause();
        }
        true
    }
}

impl NcclComm {
    /// Joins a communicator. Returns when all have joined.
    pub(super) fn connect(
        rank: &Arc<NcclRank>,
        members: CommMembers<'_>,
        terms: CommTerms,
        limit: Limit,
    ) -> Result<Self> {
        CommState::connect(rank, members, terms, limit)
    }

    /// Returns what the watchdog sees.
    pub(super) fn line(&self) -> &Arc<CommState> {
        &self.0
    }

    /// Enqueues the NCCL calls of `enqueue` as one group after the work `after`, and returns while they run. The event
    /// marks their end.
    ///
    /// The memory that they use must stay unchanged until then.
    pub(super) fn issue(
        &self,
        op: &'static str,
        after: &PriorWork,
        enqueue: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
    ) -> Result<Arc<CudaEvent>> {
        self.issue_marked(op, after, enqueue, || true)
    }

    /// Like [`issue`](Self::issue). The end is put on the stream once `may_mark` says so, which may wait a little.
    pub(super) fn issue_marked(
        &self,
        op: &'static str,
        after: &PriorWork,
        enqueue: impl FnOnce(sys::ncclComm_t, sys::cudaStream_t) -> sys::ncclResult_t,
        may_mark: impl FnMut() -> bool,
    ) -> Result<Arc<CudaEvent>> {
        let number = self.0.made.fetch_add(1, Ordering::Relaxed);
        self.0.issue(op, after, number, enqueue, may_mark)
    }

    /// Returns whether NCCL will connect to other members for these exchanges, and so wait for them.
    pub(super) fn has_to_meet(&self, exchanges: impl Iterator<Item = (bool, usize)>) -> bool {
        let met = self.0.met.lock();
        exchanges.into_iter().any(|exchange| !met.contains(&exchange))
    }

    /// Notes exchanges that have been enqueued.
    pub(super) fn note_met(&self, exchanges: impl Iterator<Item = (bool, usize)>) {
        self.0.met.lock().extend(exchanges);
    }

    /// Connects the two members of a lane. Both must call it. It moves a byte in memory of the communicator's own stream, and so
    /// waits for nothing else on the GPU.
    pub(super) fn connect_lane(&self, me: usize) -> Result<()> {
        self.0.rank.bind()?;
        let byte = self.0.stream.alloc_zeros::<u8>(1).map_err(driver)?;
        let place = {
            use cudarc::driver::DevicePtr;
            byte.device_ptr(&self.0.stream).0 as *mut std::ffi::c_void
        };
        let (peer, kind) = (1 - me as i32, sys::ncclDataType_t::ncclUint8);
        let enqueue = |comm, stream| match me {
            // SAFETY: the communicator is alive and locked by the caller. The byte is freed on the stream of this call.
            0 => unsafe { sys::ncclSend(place, 1, kind, peer, comm, stream) },
            // SAFETY: see above.
            _ => unsafe { sys::ncclRecv(place, 1, kind, peer, comm, stream) },
        };
        // The number of no message.
        let moved = self.0.issue("connect", &PriorWork::default(), 0, enqueue, || true);
        moved.map(drop)
    }

    /// Marks the present end of the communicator's stream.
    pub(super) fn mark(&self) -> Result<CudaEvent> {
        self.0.stream.record_event(None).map_err(driver)
    }

    /// Waits on the host until the receiver has enqueued the receive of the message `number`.
    pub(super) fn wait_for_receiver(&self, number: u64) -> Result<()> {
        match &self.0.limit {
            // They meet in the call.
            Limit::Send(sending) if self.0.member.is_none() => {
                self.0.wait_until(number, || Ok(self.0.rank.watch.is_awaited(sending.channel, number)))
            }
            _ => Ok(()),
        }
    }

    /// Tells the receiver that the message `number` is enqueued.
    pub(super) fn note_sent(&self, number: u64) {
        if let Limit::Send(sending) = &self.0.limit {
            self.0.rank.watch.note_sent(sending.to, sending.channel, number);
        }
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
        if std::thread::panicking() || !self.0.is_settled() {
            return self.0.abort(self.0.handle.lock());
        }
        if self.0.handle.lock().is_some() {
            self.0.rank.parked.park(self.0.clone());
            self.0.rank.parked.tidy();
        }
    }
}
