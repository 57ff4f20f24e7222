//! The functions of libnccl that the build calls.
use super::init::{ID_BYTES, unique_id};
use super::part::{Call, Part};
use super::{Due, Launch, State, code, is_per_thread, launch, resolve};
use crate::abi::{self, put};
use crate::engine::{Sim, lock, wait};
use crate::number::Type;
use crate::report::{Kind, Site, fault};
use parking_lot::MutexGuard;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::{c_char, c_int};
use std::sync::Arc;
use std::sync::atomic::Ordering;

/// `ncclUniqueId`.
#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct UniqueId {
    pub(crate) internal: [u8; ID_BYTES],
}

/// The start of `ncclConfig_t`.
#[repr(C)]
pub(crate) struct Config {
    pub(crate) size: usize,
    pub(crate) magic: u32,
    pub(crate) version: u32,
    pub(crate) blocking: c_int,
}

/// A call between the start and the end of a group.
struct Queued {
    comm: u64,
    stream: u64,
    part: Part,
    site: Arc<Site>,
}

/// The group of the calling thread ("Group Calls": groups belong to a thread, and only the outermost end acts).
#[derive(Default)]
struct Group {
    depth: usize,
    calls: Vec<Queued>,
}

thread_local! {
    static GROUP: RefCell<Group> = RefCell::default();
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGetVersion(version: *mut c_int) -> c_int {
    put(version, 23007);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGetUniqueId(id: *mut UniqueId) -> c_int {
    put(id, UniqueId { internal: unique_id() });
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGetErrorString(result: c_int) -> *const c_char {
    let text = match result {
        code::SUCCESS => c"no error",
        1 => c"unhandled cuda error",
        2 => c"unhandled system error",
        3 => c"internal error",
        code::INVALID_ARGUMENT => c"invalid argument",
        code::INVALID_USAGE => c"invalid usage",
        6 => c"remote process exited or there was a network error",
        code::IN_PROGRESS => c"NCCL operation in progress",
        _ => c"unknown result code",
    };
    text.as_ptr()
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGetLastError(_comm: u64) -> *const c_char {
    thread_local! {
        static TEXT: RefCell<std::ffi::CString> = RefCell::default();
    }
    let text = std::ffi::CString::new(lock().comms.last_error.clone()).unwrap_or_default();
    TEXT.with(|slot| {
        *slot.borrow_mut() = text;
        slot.borrow().as_ptr()
    })
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommInitRankConfig(
    comm: *mut u64,
    size: c_int,
    id: UniqueId,
    rank: c_int,
    config: *mut Config,
) -> c_int {
    let site = Site::here("ncclCommInitRankConfig");
    // The configuration: size and magic are checked, and `blocking` is 0, 1 or undefined.
    let blocking = abi::with(config, |config| {
        let undefined = config.blocking == i32::MIN;
        (config.magic == 0xcafe_beef && (undefined || (0..2).contains(&config.blocking)))
            .then_some(config.blocking != 0)
    });
    let Some(blocking) = blocking.unwrap_or(Some(true)) else { return code::INVALID_ARGUMENT };
    if size < 1 || rank < 0 || rank >= size || GROUP.with_borrow(|group| group.depth > 0) {
        return code::INVALID_ARGUMENT;
    }
    // "Creating a Communicator": it belongs to the current device of the calling thread.
    let Some(device) = abi::current_device() else { return 1 };
    let mut sim = lock();
    let (handle, polls) = (sim.handle(), sim.random.below(4));
    put(comm, handle);
    sim.comms.join(handle, &id.internal, [rank as usize, size as usize], device, blocking, polls);
    sim.progress += 1;
    if !blocking {
        return code::IN_PROGRESS;
    }
    wait(&mut sim, &site, |sim| {
        !matches!(sim.comms.comms.get(&handle).map(|comm| comm.state), Some(State::Joining(_)))
    });
    state(&mut sim, handle, &site)
}

/// Returns the state of a communicator as NCCL's code.
fn state(sim: &mut MutexGuard<'static, Sim>, handle: u64, site: &Arc<Site>) -> c_int {
    let Some(comm) = sim.comms.comms.get(&handle) else { return gone(sim, handle, site) };
    match comm.state {
        State::Ready | State::Finalized => code::SUCCESS,
        State::Refused => code::INVALID_USAGE,
        State::Joining(_) | State::Enqueuing | State::Finalizing => code::IN_PROGRESS,
    }
}

/// A handle that is no communicator: after an abort or a destroy, any use is a use after free.
fn gone(sim: &MutexGuard<'static, Sim>, handle: u64, site: &Arc<Site>) -> c_int {
    let by = sim.comms.gone.get(&handle).map_or("is unknown".to_string(), |by| format!("was freed by {by}"));
    fault(Kind::Misuse, site.call(), format!("{site} uses a communicator that {by}"));
    code::INVALID_ARGUMENT
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommGetAsyncError(comm: u64, error: *mut c_int) -> c_int {
    let site = Site::here("ncclCommGetAsyncError");
    let mut sim = lock();
    sim.while_polling();
    finish(&mut sim, comm);
    put(error, state(&mut sim, comm, &site));
    code::SUCCESS
}

/// Ends a finalize when the kernels of the communicator have ended.
fn finish(sim: &mut MutexGuard<'static, Sim>, handle: u64) {
    if let Some(comm) = sim.comms.comms.get_mut(&handle)
        && comm.state == State::Finalizing
        && comm.last.as_ref().is_none_or(|last| last.is_passed())
    {
        comm.state = State::Finalized;
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommFinalize(comm: u64) -> c_int {
    let site = Site::here("ncclCommFinalize");
    let mut sim = lock();
    let Some(found) = sim.comms.comms.get_mut(&comm) else { return gone(&sim, comm, &site) };
    if found.state != State::Ready {
        fault(Kind::Misuse, site.call(), format!("{site} in state {:?}", found.state));
        return code::INVALID_ARGUMENT;
    }
    found.state = State::Finalizing;
    if !found.blocking {
        return code::IN_PROGRESS;
    }
    let last = found.last.clone();
    wait(&mut sim, &site, |_| last.as_ref().is_none_or(|last| last.is_passed()));
    finish(&mut sim, comm);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommDestroy(comm: u64) -> c_int {
    let site = Site::here("ncclCommDestroy");
    let mut sim = lock();
    let Some(found) = sim.comms.comms.get_mut(&comm) else { return gone(&sim, comm, &site) };
    if matches!(found.state, State::Joining(_) | State::Enqueuing) {
        return code::INVALID_ARGUMENT;
    }
    // Finalizes first if that is not done.
    let last = found.last.clone();
    wait(&mut sim, &site, |_| last.as_ref().is_none_or(|last| last.is_passed()));
    sim.comms.comms.remove(&comm);
    sim.comms.gone.insert(comm, site);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommAbort(comm: u64) -> c_int {
    let site = Site::here("ncclCommAbort");
    let mut sim = lock();
    let Some(found) = sim.comms.comms.remove(&comm) else { return gone(&sim, comm, &site) };
    found.shared.aborted.store(true, Ordering::Relaxed);
    sim.comms.gone.insert(comm, site);
    // What NCCL's thread has not enqueued yet never runs.
    let (dropped, kept) = std::mem::take(&mut sim.comms.due).into_iter().partition(|due: &Due| due.comm == comm);
    sim.comms.due = kept;
    for id in dropped.iter().flat_map(|due: &Due| &due.gaps) {
        if let Some(stream) = sim.stream(*id) {
            stream.gap = None;
        }
    }
    sim.progress += 1;
    sim.after_call();
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGroupEnd() -> c_int {
    let calls = GROUP.with_borrow_mut(|group| match group.depth {
        0 => None,
        1 => {
            group.depth = 0;
            Some(std::mem::take(&mut group.calls))
        }
        _ => {
            group.depth -= 1;
            Some(Vec::new())
        }
    });
    calls.map_or(code::INVALID_USAGE, enqueue)
}

/// Checks a call and adds it to the thread's group, or enqueues it if there is none.
fn add(comm: u64, stream: u64, mut part: Part, name: &str) -> c_int {
    let site = Site::here(name);
    let mut sim = lock();
    let Some(found) = sim.comms.comms.get(&comm) else { return gone(&sim, comm, &site) };
    if found.state != State::Ready || part.root >= found.shared.size {
        // "Creating a Communicator": while the state is in progress, only the error may be asked for.
        let text = format!("{site} in state {:?}, root or peer {} of {}", found.state, part.root, found.shared.size);
        fault(Kind::Misuse, name, text);
        return code::INVALID_ARGUMENT;
    }
    let (shared, device) = (found.shared.clone(), found.device);
    for (address, len) in part.input(&shared).into_iter().chain(part.output(&shared)) {
        if sim.memory.owner(address) != Some(device) {
            let owner = sim.memory.owner(address);
            let text = format!("{site}: {len} bytes at {address:#x} belong to {owner:?}, not to GPU {device}");
            fault(Kind::Misuse, name, text);
            return code::INVALID_ARGUMENT;
        }
    }
    if overlaps(&part, &shared) {
        // "In-place Operations": only the documented offsets.
        fault(Kind::Misuse, name, format!("{site}: the buffers overlap, and not as calls in place do"));
        return code::INVALID_ARGUMENT;
    }
    let Some(found) = sim.comms.comms.get_mut(&comm) else { return code::INVALID_ARGUMENT };
    let number = match part.call {
        Call::Send => found.sends.entry(part.root).or_default(),
        Call::Recv => found.receives.entry(part.root).or_default(),
        _ => &mut found.collectives,
    };
    part.number = *number;
    *number += 1;
    drop(sim);
    let queued = Queued { comm, stream, part, site };
    let alone = GROUP.with_borrow_mut(|group| match group.depth {
        0 => Some(queued),
        _ => {
            group.calls.push(queued);
            None
        }
    });
    alone.map_or(code::SUCCESS, |queued| enqueue(vec![queued]))
}

/// Returns whether the buffers overlap in a way that is not documented.
fn overlaps(part: &Part, comm: &super::Shared) -> bool {
    let (Some((from, read)), Some((to, written))) = (part.input(comm), part.output(comm)) else { return false };
    let apart = from + read as u64 <= to || to + written as u64 <= from;
    let offset = (comm.rank * part.count * part.dtype.size()) as u64;
    let in_place = match part.call {
        Call::AllGather => from == to + offset,
        Call::ReduceScatter => to == from + offset,
        _ => from == to,
    };
    !apart && !in_place
}

/// Puts the calls of a group on their streams: one kernel for each communicator.
fn enqueue(calls: Vec<Queued>) -> c_int {
    let mut by_comm: BTreeMap<u64, Vec<Queued>> = BTreeMap::new();
    for call in calls {
        by_comm.entry(call.comm).or_default().push(call);
    }
    let mut sim = lock();
    let mut result = code::SUCCESS;
    for (comm, calls) in by_comm {
        let Some(found) = sim.comms.comms.get_mut(&comm) else { continue };
        let (shared, device, blocking) = (found.shared.clone(), found.device, found.blocking);
        let site = calls[0].site.clone();
        let handles: Vec<u64> = calls.iter().map(|call| call.stream).collect();
        let work = Launch::new(shared, calls.into_iter().map(|call| call.part).collect());
        let streams = resolve(&mut sim, &handles, device, std::thread::current().id(), &site);
        if streams.is_empty() {
            return code::INVALID_ARGUMENT;
        }
        if let Some(&other) = streams.iter().find(|&&id| sim.stream(id).is_none_or(|stream| stream.device != device)) {
            fault(Kind::Misuse, site.call(), format!("{site}: stream {other:#x} is not of GPU {device}"));
            return code::INVALID_ARGUMENT;
        }
        if blocking {
            launch(&mut sim, comm, work, &streams, site);
            continue;
        }
        // "Creating a Communicator": a nonblocking communicator enqueues on a thread of NCCL.
        if let Some(found) = sim.comms.comms.get_mut(&comm) {
            found.state = State::Enqueuing;
        }
        for &id in &streams {
            if is_per_thread(&mut sim, id) {
                let text = format!("{site}: NCCL's thread takes the per-thread stream for its own (NCCL issue 1976)");
                fault(Kind::Misuse, site.call(), text);
            }
            if let Some(stream) = sim.stream(id) {
                stream.gap = Some(site.clone());
            }
        }
        let polls = sim.random.below(3);
        let due = Due { comm, launch: work, streams: handles, gaps: streams, device, polls, site };
        sim.comms.due.push(due);
        result = code::IN_PROGRESS;
    }
    sim.after_call();
    result
}

/// What the calls have in common: their buffers, count, dtype, op and root or peer.
struct Arguments {
    buffers: [u64; 2],
    count: usize,
    codes: [c_int; 3],
}

impl Arguments {
    fn call(self, call: Call, comm: u64, stream: u64, name: &str) -> c_int {
        let ([send, recv], [dtype, op, root]) = (self.buffers, self.codes);
        match (Type::of_nccl(dtype), usize::try_from(root)) {
            (Some(dtype), Ok(root)) if (0..5).contains(&op) => {
                let part = Part { call, send, recv, count: self.count, dtype, op, root, number: 0 };
                add(comm, stream, part, name)
            }
            _ => code::INVALID_ARGUMENT,
        }
    }
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclAllReduce(
    send: u64,
    recv: u64,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [send, recv], count, codes: [dtype, op, 0] }.call(
        Call::AllReduce,
        comm,
        stream,
        "ncclAllReduce",
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclBroadcast(
    send: u64,
    recv: u64,
    count: usize,
    dtype: c_int,
    root: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [send, recv], count, codes: [dtype, 0, root] }.call(
        Call::Broadcast,
        comm,
        stream,
        "ncclBroadcast",
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclReduce(
    send: u64,
    recv: u64,
    count: usize,
    dtype: c_int,
    op: c_int,
    root: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [send, recv], count, codes: [dtype, op, root] }.call(Call::Reduce, comm, stream, "ncclReduce")
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclAllGather(
    send: u64,
    recv: u64,
    count: usize,
    dtype: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [send, recv], count, codes: [dtype, 0, 0] }.call(
        Call::AllGather,
        comm,
        stream,
        "ncclAllGather",
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclReduceScatter(
    send: u64,
    recv: u64,
    count: usize,
    dtype: c_int,
    op: c_int,
    comm: u64,
    stream: u64,
) -> c_int {
    Arguments { buffers: [send, recv], count, codes: [dtype, op, 0] }.call(
        Call::ReduceScatter,
        comm,
        stream,
        "ncclReduceScatter",
    )
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclSend(send: u64, count: usize, dtype: c_int, peer: c_int, comm: u64, stream: u64) -> c_int {
    Arguments { buffers: [send, 0], count, codes: [dtype, 0, peer] }.call(Call::Send, comm, stream, "ncclSend")
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclRecv(recv: u64, count: usize, dtype: c_int, peer: c_int, comm: u64, stream: u64) -> c_int {
    Arguments { buffers: [0, recv], count, codes: [dtype, 0, peer] }.call(Call::Recv, comm, stream, "ncclRecv")
}
