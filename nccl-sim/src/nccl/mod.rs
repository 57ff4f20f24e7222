//! NCCL: communicators, and the kernels that their calls put on streams.
//!
//! Rules: NCCL User Guide, "Creating a Communicator", "Group Calls", "Thread Safety" and the API; the section is named
//! where a rule is applied.
pub(crate) mod api;
mod connect;
mod exchange;
mod init;
mod part;

use crate::abi::{Thread, thread};
use crate::clock::{Clock, Mark};
use crate::engine::{HardwareQueue, Sim, StreamKind, Timeline, Work};
use crate::memory::{Accessor, Memory, NOISE};
use crate::report::{Kind, Site, fault};
use crate::settings::{self, Wrong};
use exchange::{Exchange, Key};
pub(crate) use part::Part;
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet};
use std::io::Write;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};

/// `ncclResult_t`.
pub(crate) mod code {
    pub(crate) const SUCCESS: i32 = 0;
    pub(crate) const SYSTEM_ERROR: i32 = 2;
    pub(crate) const INVALID_ARGUMENT: i32 = 4;
    pub(crate) const INVALID_USAGE: i32 = 5;
    pub(crate) const REMOTE_ERROR: i32 = 6;
    pub(crate) const IN_PROGRESS: i32 = 7;
}

/// The part of a communicator that its kernels on streams share with it.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) id: u64,
    pub(crate) rank: usize,
    pub(crate) size: usize,
    pub(crate) aborted: AtomicBool,
    /// What is wrong with its network, if anything.
    pub(crate) wrong: OnceLock<Wrong>,
}

/// What the host's part of a communicator does.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum State {
    /// Waits for the other members; then for this many polls.
    Joining(u64),
    Ready,
    /// NCCL's thread still enqueues a group.
    Enqueuing,
    /// The init was refused.
    Refused,
    Finalizing,
    Finalized,
}

struct Comm {
    shared: Arc<Shared>,
    device: usize,
    blocking: bool,
    state: State,
    /// The end of the last kernel: kernels of a communicator run in the order of their calls.
    last: Option<Mark>,
    /// The numbers of the next call: of collectives, of sends and of receives for each peer.
    collectives: u64,
    sends: HashMap<usize, u64>,
    receives: HashMap<usize, u64>,
    /// The connections that it has, or has asked for.
    connected: HashSet<Key>,
    /// Whether algorithms are connected at their first call, not by the init (`NCCL_RUNTIME_CONNECT`).
    connects_in_calls: bool,
    /// Whether members may share a GPU (`NCCL_MULTI_RANK_GPU_ENABLE`).
    multi_rank: bool,
    /// The most CTAs of a kernel, by its configuration, and how many its kernels have.
    max_ctas: usize,
    ctas: usize,
    /// The hardware queue of its own stream, which waits for each of its kernels (`ncclLaunchFinish`).
    queue: HardwareQueue,
}

/// One group of calls on one communicator: one kernel.
pub(crate) struct Launch {
    pub(crate) shared: Arc<Shared>,
    pub(crate) parts: Vec<Part>,
    pub(crate) started: bool,
    /// How many CTAs its kernel has, and how many of them are on the device.
    pub(crate) ctas: usize,
    pub(crate) held: usize,
    /// What the calls need from other members, and how much of it was there at the last look.
    needs: Vec<Key>,
    there: Cell<usize>,
}

impl Launch {
    fn new(shared: Arc<Shared>, parts: Vec<Part>, ctas: usize) -> Self {
        let needs = parts.iter().flat_map(|part| part.needs(&shared)).collect();
        Self { shared, parts, started: false, ctas, held: 0, needs, there: Cell::new(0) }
    }
}

/// A launch that NCCL's thread has not put on its streams yet.
struct Due {
    comm: u64,
    launch: Launch,
    /// The handles of the streams, as the program gave them.
    streams: Vec<u64>,
    /// The streams that they meant for the program.
    gaps: Vec<u64>,
    device: usize,
    polls: u64,
    /// The connections of other members that it waits for.
    connects: Vec<Key>,
    site: Arc<Site>,
    /// The time of the call on the timeline.
    issued: f64,
}

/// All communicators of the process.
#[derive(Default)]
pub(crate) struct Comms {
    comms: BTreeMap<u64, Comm>,
    exchange: Exchange,
    due: Vec<Due>,
    /// The handles that were aborted or destroyed.
    gone: HashMap<u64, Arc<Site>>,
    last_error: String,
    /// How many calls the process has made.
    calls: u64,
    /// The members of each communicator in this process.
    members: HashMap<u64, Members>,
    /// The factors of the reductions that a program has made, by communicator and number.
    scales: HashMap<(u64, i32), f64>,
}

/// The members of a communicator in this process.
#[derive(Default)]
struct Members {
    devices: Vec<usize>,
    /// How many were destroyed or aborted.
    gone: usize,
}

impl Comms {
    /// Returns whether the kernel can start or end.
    pub(crate) fn can_advance(&self, launch: &Launch, room: bool) -> bool {
        let aborted = launch.shared.aborted.load(Ordering::Relaxed);
        let works = launch.shared.wrong.get().is_none();
        aborted || works && if launch.started { self.lacking(launch).is_none() } else { room }
    }

    /// Returns what a kernel waits for.
    pub(crate) fn lacks(&self, launch: &Launch) -> String {
        if launch.shared.wrong.get().is_some() {
            return "a network that is lost".to_string();
        }
        self.lacking(launch).map_or("its turn".to_string(), |key| format!("message {key}"))
    }

    /// Forgets the communicators and messages of earlier worlds.
    pub(crate) fn forget(&mut self) {
        self.gone.clear();
        self.members.clear();
        self.scales.clear();
        self.exchange.forget();
    }

    /// Counts a call. Returns what goes wrong at it.
    fn fault_of_next_call(&mut self, site: &Site) -> Option<Wrong> {
        let number = self.calls;
        self.calls += 1;
        let (wrong, _) = settings::get().fault.filter(|(_, at)| *at == number)?;
        self.last_error = format!("the simulated network {wrong:?}");
        // The standard output of a test is captured, and this is for the program that started the process.
        let _ = writeln!(std::io::stderr(), "nccl-sim: injected: NCCL {wrong:?} call {number}, {site}");
        Some(wrong)
    }

    /// Reports memory of a call that the other members of this process may not access. Between GPUs of one process, NCCL
    /// reads and writes the buffers directly ("Environment Variables", `NCCL_P2P_DIRECT_DISABLE`).
    fn check_access(&self, launch: &Launch, memory: &Memory, device: usize, site: &Arc<Site>) {
        if std::env::var("NCCL_P2P_DIRECT_DISABLE").is_ok_and(|value| value == "1") {
            return;
        }
        for part in &launch.parts {
            let peer = matches!(part.call, part::Call::Send | part::Call::Recv).then_some(part.root);
            let here = self.comms.values().filter(|comm| comm.shared.id == launch.shared.id);
            let uses = part.input(&launch.shared).or(part.output(&launch.shared)).is_some();
            for other in here.filter(|comm| uses && peer.is_none_or(|peer| comm.shared.rank == peer)) {
                if !memory.is_open(device, other.device) {
                    let text =
                        format!("{site} on GPU {device}: GPU {} may not access its pool", other.device);
                    fault(Kind::Memory, format!("pool of {device} for {}", other.device), text);
                }
            }
        }
    }

    fn lacking(&self, launch: &Launch) -> Option<Key> {
        for &key in launch.needs.iter().skip(launch.there.get()) {
            if !self.exchange.has(key) {
                return Some(key);
            }
            launch.there.set(launch.there.get() + 1);
        }
        None
    }

    /// Starts or ends a kernel. Returns whether it has ended.
    pub(crate) fn advance(
        &mut self,
        launch: &mut Launch,
        (memory, clock, at, timeline): (&mut Memory, &mut Arc<Clock>, &mut f64, &mut Timeline),
        agent: usize,
        device: usize,
        site: &Arc<Site>,
    ) -> bool {
        let shared = launch.shared.clone();
        if shared.aborted.load(Ordering::Relaxed) {
            // ncclCommAbort: kernels leave early, and their outputs are undefined.
            let who = Accessor { clock, agent, site };
            for (address, len) in launch.parts.iter().filter_map(|part| part.output(&shared)) {
                memory.write(address, len, None, device, &who);
            }
            return true;
        }
        if launch.held < launch.ctas {
            return false;
        }
        if !launch.started {
            launch.started = true;
            self.check_access(launch, memory, device, site);
            for part in &launch.parts {
                let who = Accessor { clock, agent, site };
                let data = part.input(&shared).map(|(address, len)| {
                    let known = memory.note_read(address, len, device, &who);
                    let bytes = if known { memory.peek(address, len, device, &who) } else { None };
                    part.scaled(bytes.map_or(vec![NOISE; len], <[u8]>::to_vec))
                });
                let data = data.unwrap_or_default();
                self.exchange.put(part.announces(&shared), part.head(site), data, (clock.clone(), *at));
            }
            return false;
        }
        let others = launch.needs.iter().filter_map(|&key| self.exchange.get(key));
        let begin = others.fold(*at, |begin, message| begin.max(message.at));
        *at = timeline.communicates(device, begin, launch.parts.iter().map(|part| part.sent(&shared)).sum());
        for part in &launch.parts {
            let result = part.result(&shared, &self.exchange, clock, site);
            let who = Accessor { clock, agent, site };
            if let (Some((address, len)), Some(data)) = (part.output(&shared), result) {
                let fits = data.len() == len;
                memory.write(address, len, fits.then_some(&data[..]), device, &who);
            }
            part.release(&shared, &mut self.exchange);
        }
        true
    }

    /// NCCL's threads make progress: a member joins, a group is enqueued.
    pub(crate) fn poll(&mut self) {
        for comm in self.comms.values_mut() {
            if let State::Joining(polls) = comm.state {
                comm.state = match polls {
                    0 if init::all_are_there(&self.exchange, &comm.shared) => State::Ready,
                    0 => State::Joining(0),
                    polls => State::Joining(polls - 1),
                };
                if comm.state == State::Ready
                    && let Some(why) = init::refusal(&self.exchange, comm)
                {
                    comm.state = State::Refused;
                    self.last_error = why;
                }
                comm.ctas = init::ctas(&self.exchange, &comm.shared).min(comm.max_ctas);
            }
        }
        self.due.iter_mut().for_each(|due| due.polls = due.polls.saturating_sub(1));
    }

    /// Returns the position of a launch whose time has come, and whose members are connected.
    fn next_due(&self) -> Option<usize> {
        let is_there = |key: &Key| self.exchange.has(*key);
        self.due.iter().position(|due| due.polls == 0 && due.connects.iter().all(is_there))
    }

    /// Describes the calls whose members are not connected.
    pub(crate) fn unconnected(&self) -> Vec<String> {
        let lacking = |due: &Due| {
            let key = due.connects.iter().find(|key| !self.exchange.has(**key))?;
            Some(format!(
                "\n  GPU {}: {} waits in the call for another member to connect: {key}",
                due.device, due.site
            ))
        };
        self.due.iter().filter_map(lacking).collect()
    }

    /// Puts the launches on their streams whose time has come.
    pub(crate) fn launch_due(sim: &mut Sim) {
        while let Some(at) = sim.comms.next_due() {
            let due = sim.comms.due.remove(at);
            for id in &due.gaps {
                if let Some(stream) = sim.stream(*id) {
                    stream.gap = None;
                }
            }
            let worker = worker();
            let streams = resolve(sim, &due.streams, due.device, worker, &due.site);
            launch(sim, due.comm, due.launch, &streams, due.site, due.issued);
            if let Some(comm) = sim.comms.comms.get_mut(&due.comm)
                && comm.state == State::Enqueuing
            {
                comm.state = State::Ready;
            }
        }
    }
}

/// Returns the id of the thread that enqueues for nonblocking communicators. A handle of a per-thread stream means that
/// thread's stream there (NCCL issue 1976).
fn worker() -> Thread {
    static WORKER: std::sync::OnceLock<Thread> = std::sync::OnceLock::new();
    *WORKER.get_or_init(|| std::thread::spawn(thread).join().unwrap_or_else(|_| thread()))
}

/// Returns the streams that the handles mean for a thread, without repetitions.
fn resolve(sim: &mut Sim, handles: &[u64], device: usize, thread: Thread, site: &Arc<Site>) -> Vec<u64> {
    let mut streams = Vec::new();
    for &handle in handles {
        match sim.resolve(handle, device, thread) {
            Some(id) if !streams.contains(&id) => streams.push(id),
            Some(_) => {}
            None => fault(Kind::Misuse, site.call(), format!("{site} on a stream that does not exist")),
        }
    }
    streams
}

/// Puts a kernel on the first stream and lets the others wait for each other ("Group calls", "Using multiple streams").
fn launch(sim: &mut Sim, comm: u64, launch: Launch, streams: &[u64], site: Arc<Site>, issued: f64) {
    let Some((&first, others)) = streams.split_first() else { return };
    let mut waits: Vec<Mark> = others.iter().map(|&other| sim.tail(other)).collect();
    waits.extend(sim.comms.comms.get(&comm).and_then(|comm| comm.last.clone()));
    let mark = sim.append(first, site.clone(), waits, Work::Nccl(Box::new(launch)), issued);
    for &other in others {
        sim.append(other, site.clone(), vec![mark.clone()], Work::Nothing, issued);
    }
    if let Some(comm) = sim.comms.comms.get_mut(&comm) {
        comm.last = Some(mark.clone());
        let queue = comm.queue;
        sim.park(queue, &mark);
    }
}

/// Returns whether the handle means a stream that belongs to one host thread.
fn is_per_thread(sim: &mut Sim, id: u64) -> bool {
    sim.stream(id).is_some_and(|stream| matches!(stream.kind, StreamKind::PerThread(_)))
}
