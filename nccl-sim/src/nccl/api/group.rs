//! Groups of calls, and how they come onto streams.
use super::comm::gone;
use crate::engine::{lock, wait};
use crate::nccl::part::{Call, Part};
use crate::nccl::{Due, Launch, Shared, State, code, is_per_thread, launch, resolve};
use crate::report::{Kind, Site, fault};
use crate::settings::Wrong;
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::ffi::c_int;
use std::sync::Arc;

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
/// Returns whether the calling thread is in a group.
pub(super) fn is_open() -> bool {
    GROUP.with_borrow(|group| group.depth > 0)
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGroupStart() -> c_int {
    GROUP.with_borrow_mut(|group| group.depth += 1);
    code::SUCCESS
}

#[unsafe(no_mangle)]
pub(crate) extern "C" fn ncclGroupEnd() -> c_int {
    crate::tally::count("ncclGroupEnd");
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
pub(super) fn add(comm: u64, stream: u64, mut part: Part, name: &str) -> c_int {
    let site = Site::here(name);
    let mut sim = lock();
    let Some(found) = sim.comms.comms.get(&comm) else { return gone(&sim, comm, &site) };
    if found.state != State::Ready || part.root >= found.shared.size {
        // "Creating a Communicator": while the state is in progress, only the error may be asked for.
        let text =
            format!("{site} in state {:?}, root or peer {} of {}", found.state, part.root, found.shared.size);
        fault(Kind::Misuse, name, text);
        return code::INVALID_ARGUMENT;
    }
    let (shared, device) = (found.shared.clone(), found.device);
    for (address, len) in part.input(&shared).into_iter().chain(part.output(&shared)) {
        if sim.memory.owner(address) != Some(device) {
            let owner = sim.memory.owner(address);
            let text =
                format!("{site}: {len} bytes at {address:#x} belong to {owner:?}, not to GPU {device}");
            fault(Kind::Misuse, name, text);
            return code::INVALID_ARGUMENT;
        }
    }
    if overlaps(&part, &shared) {
        // "In-place Operations": only the documented offsets.
        fault(Kind::Misuse, name, format!("{site}: the buffers overlap, and not as calls in place do"));
        return code::INVALID_ARGUMENT;
    }
    let wrong = sim.comms.fault_of_next_call(&site);
    if wrong == Some(Wrong::Refuses) {
        return code::SYSTEM_ERROR;
    }
    wrong.into_iter().for_each(|wrong| shared.wrong.set(wrong).unwrap_or_default());
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
fn overlaps(part: &Part, comm: &Shared) -> bool {
    let (Some((from, read)), Some((to, written))) = (part.input(comm), part.output(comm)) else {
        return false;
    };
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
    sim.timeline.launches();
    let issued = sim.timeline.now();
    let mut result = code::SUCCESS;
    for (comm, calls) in by_comm {
        let comms = &mut sim.comms;
        let Some(found) = comms.comms.get_mut(&comm) else { continue };
        let (shared, device, blocking) = (found.shared.clone(), found.device, found.blocking);
        let site = calls[0].site.clone();
        let handles: Vec<u64> = calls.iter().map(|call| call.stream).collect();
        let ctas = found.ctas;
        let parts: Vec<Part> = calls.into_iter().map(|call| call.part).collect();
        let connects = found.connect(&parts, &comms.exchange);
        let work = Launch::new(shared, parts, ctas);
        let streams = resolve(&mut sim, &handles, device, crate::abi::thread(), &site);
        if streams.is_empty() {
            return code::INVALID_ARGUMENT;
        }
        if let Some(&other) =
            streams.iter().find(|&&id| sim.stream(id).is_none_or(|stream| stream.device != device))
        {
            fault(Kind::Misuse, site.call(), format!("{site}: stream {other:#x} is not of GPU {device}"));
            return code::INVALID_ARGUMENT;
        }
        if blocking {
            wait(&mut sim, &site, |sim| connects.iter().all(|&key| sim.comms.exchange.has(key)));
            launch(&mut sim, comm, work, &streams, site, issued);
            continue;
        }
        // "Creating a Communicator": a nonblocking communicator enqueues on a thread of NCCL.
        if let Some(found) = sim.comms.comms.get_mut(&comm) {
            found.state = State::Enqueuing;
        }
        for &id in &streams {
            if is_per_thread(&mut sim, id) {
                let text = format!(
                    "{site}: NCCL's thread takes the per-thread stream for its own (NCCL issue 1976)"
                );
                fault(Kind::Misuse, site.call(), text);
            }
            if let Some(stream) = sim.stream(id) {
                stream.gap = Some(site.clone());
            }
        }
        let polls = sim.random.below(3);
        // "group.cc": every group of a nonblocking communicator starts a thread.
        crate::tally::count("threads that NCCL starts");
        let due = Due {
            comm,
            launch: work,
            streams: handles,
            gaps: streams,
            device,
            polls,
            connects,
            site,
            issued,
        };
        sim.comms.due.push(due);
        result = code::IN_PROGRESS;
    }
    sim.after_call();
    result
}
