//! The life of communicators.
use crate::abi::{self, put};
use crate::engine::{Sim, lock, wait, wait_for_device};
use crate::nccl::init::{ID_BYTES, InitConfig, MAX_CHANNELS, unique_id};
use crate::nccl::{Due, State, code};
use crate::report::{Kind, Site, fault};
use crate::settings::{Wrong, nccl_variables};
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
    pub(crate) cga_cluster_size: c_int,
    pub(crate) min_ctas: c_int,
    pub(crate) max_ctas: c_int,
}

/// `NCCL_CONFIG_UNDEF_INT`.
const UNDEFINED: c_int = c_int::MIN;

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
    // The configuration: the magic is checked, `blocking` is 0, 1 or undefined, and `maxCTAs` is positive or undefined.
    let said = abi::with(config, |config| {
        let is_flag = config.blocking == UNDEFINED || (0..2).contains(&config.blocking);
        let is_count = config.max_ctas == UNDEFINED || config.max_ctas > 0;
        (config.magic == 0xcafe_beef && is_flag && is_count)
            .then_some((config.blocking != 0, usize::try_from(config.max_ctas).ok()))
    });
    let Some((blocking, asked)) = said.unwrap_or(Some((true, None))) else { return code::INVALID_ARGUMENT };
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
    let variables = sim.rules.nccl.unwrap_or_else(nccl_variables);
    // `envConfigOverride` (`init.cc`): the variable replaces the configuration.
    let max_ctas = variables.max_ctas.or(asked).unwrap_or(MAX_CHANNELS).min(MAX_CHANNELS);
    // Its streams for the device and for the host (`initTransportsRank`), which nothing is put on here.
    let queue = sim.deal(device);
    sim.deal(device);
    let (connects_in_calls, multi_rank) = (variables.runtime_connect, variables.multi_rank);
    let config = InitConfig { blocking, polls, max_ctas, connects_in_calls, multi_rank, queue };
    sim.comms.join(handle, &id.internal, [rank as usize, size as usize], device, config);
    sim.progress += 1;
    if !blocking {
        return code::IN_PROGRESS;
    }
    wait(&mut sim, &site, |sim| {
        !matches!(sim.comms.comms.get(&handle).map(|comm| comm.state), Some(State::Joining(_)))
    });
    state(&mut sim, handle, &site)
}

/// Ends the process if no kernel of a communicator fits on its device. On a card, each would wait for ever.
fn check_room(sim: &MutexGuard<'static, Sim>, handle: u64) {
    let Some(comm) = sim.comms.comms.get(&handle) else { return };
    let (needed, there) = (comm.ctas, sim.rules.ctas);
    if needed > there {
        crate::report::die(&format!(
            "a kernel of this communicator has {needed} CTAs, and the GPU has {there} (SIM_CTAS): set NCCL_MAX_CTAS or maxCTAs"
        ));
    }
}

/// Returns the state of a communicator as NCCL's code.
fn state(sim: &mut MutexGuard<'static, Sim>, handle: u64, site: &Arc<Site>) -> c_int {
    let Some(comm) = sim.comms.comms.get(&handle) else { return gone(sim, handle, site) };
    if comm.shared.wrong.get() == Some(&Wrong::Loses) {
        return code::REMOTE_ERROR;
    }
    match comm.state {
        State::Ready => {
            check_room(sim, handle);
            code::SUCCESS
        }
        State::Finalized => code::SUCCESS,
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
    let (last, id) = (found.last.clone(), found.shared.id);
    wait(&mut sim, &site, |_| last.as_ref().is_none_or(|last| last.is_passed()));
    sim.comms.comms.remove(&comm);
    sim.comms.gone.insert(comm, site.clone());
    reclaim(&mut sim, id, &site);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclCommAbort(comm: u64) -> c_int {
    let site = Site::here("ncclCommAbort");
    let mut sim = lock();
    let Some(found) = sim.comms.comms.remove(&comm) else { return gone(&sim, comm, &site) };
    found.shared.aborted.store(true, Ordering::Relaxed);
    sim.comms.gone.insert(comm, site.clone());
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
    if !matches!(found.state, State::Joining(_) | State::Refused) {
        reclaim(&mut sim, found.shared.id, &site);
    }
    code::SUCCESS
}

/// `commReclaim` (`init.cc`): the last member of the process to be destroyed or aborted frees what all of them have. `cudaFree` and
/// `cudaFreeHost` wait for everything on their devices.
fn reclaim(sim: &mut MutexGuard<'static, Sim>, id: u64, site: &Arc<Site>) {
    let Some(members) = sim.comms.members.get_mut(&id) else { return };
    members.gone += 1;
    if members.gone < members.devices.len() {
        return;
    }
    let devices = sim.comms.members.remove(&id).unwrap_or_default().devices;
    for device in devices {
        wait_for_device(sim, device, site);
    }
}
