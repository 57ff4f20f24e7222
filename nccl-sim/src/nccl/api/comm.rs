//! The life of communicators.
use crate::abi::{self, put};
use crate::engine::{Sim, lock, wait};
use crate::nccl::init::{ID_BYTES, unique_id};
use crate::nccl::{Due, State, code};
use crate::report::{Kind, Site, fault};
use crate::settings::Wrong;
use parking_lot::MutexGuard;
use std::cell::RefCell;
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
        code::SYSTEM_ERROR => c"unhandled system error",
        3 => c"internal error",
        code::INVALID_ARGUMENT => c"invalid argument",
        code::INVALID_USAGE => c"invalid usage",
        code::REMOTE_ERROR => c"remote process exited or there was a network error",
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
    if size < 1 || rank < 0 || rank >= size || super::group::is_open() {
        return code::INVALID_ARGUMENT;
    }
    // "Creating a Communicator": it belongs to the current device of the calling thread.
    let Some(device) = abi::current_device() else { return 1 };
    let mut sim = lock();
    let (handle, polls) = (sim.handle(), sim.random.below(4));
    put(comm, handle);
    if sim.comms.comms.is_empty() {
        sim.begin_world();
    }
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
    if comm.shared.wrong.get() == Some(&Wrong::Loses) {
        return code::REMOTE_ERROR;
    }
    match comm.state {
        State::Ready | State::Finalized => code::SUCCESS,
        State::Refused => code::INVALID_USAGE,
        State::Joining(_) | State::Enqueuing | State::Finalizing => code::IN_PROGRESS,
    }
}

/// A handle that is no communicator: after an abort or a destroy, any use is a use after free.
pub(super) fn gone(sim: &MutexGuard<'static, Sim>, handle: u64, site: &Arc<Site>) -> c_int {
    let by = sim.comms.gone.get(&handle).map_or("is unknown".to_string(), |by| format!("was freed by {by}"));
    fault(Kind::Misuse, site.call(), format!("{site} uses a communicator that {by}"));
    code::INVALID_ARGUMENT
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommGetAsyncError(comm: u64, error: *mut c_int) -> c_int {
    crate::tally::count("ncclCommGetAsyncError");
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
    crate::tally::write();
    let site = Site::here("ncclCommDestroy");
    let mut sim = lock();
    sim.timeline.write();
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
    let (dropped, kept) =
        std::mem::take(&mut sim.comms.due).into_iter().partition(|due: &Due| due.comm == comm);
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
