//! The simulated machine: its streams, events, memory and communicators.
mod chance;
mod exec;
mod queues;
mod schedule;
mod stream;
mod timeline;

pub(crate) use chance::Random;
pub(crate) use exec::Exec;
pub(crate) use queues::HardwareQueue;
pub(crate) use schedule::{keep_running, wait, wait_for_device, wait_for_marks};
pub(crate) use stream::{Event, HostCall, StreamKind, Work};
pub(crate) use timeline::{Effort, Timeline};

use crate::abi::Thread;
use crate::clock::{Clock, Mark};
use crate::memory::Memory;
use crate::nccl::Comms;
use crate::report::{Kind, Site, fault};
use crate::settings::{self, Rules};
use parking_lot::{Condvar, Mutex, MutexGuard};
use queues::HardwareQueues;
use schedule::Policy;
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, HashSet, VecDeque};
use std::sync::{Arc, LazyLock};
use std::time::Instant;
use stream::{Op, Stream};

/// The whole simulated machine.
pub(crate) struct Sim {
    pub(crate) memory: Memory,
    pub(crate) random: Random,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) comms: Comms,
    pub(crate) timeline: Timeline,
    streams: BTreeMap<u64, Stream>,
    /// The streams that exist by themselves, by device and kind.
    implicit: HashMap<(usize, StreamKind), u64>,
    host: Arc<Clock>,
    agents: usize,
    /// The agents of streams that are gone, with their times: of this world, and of earlier ones, whose numbers are used again.
    retired: [Vec<(usize, u64)>; 2],
    next: u64,
    policy: Policy,
    /// How many operations have run or been enqueued.
    pub(crate) progress: u64,
    /// The progress that a thread which polls has seen, and since when.
    idle: Option<(u64, Instant)>,
    /// What the cards and NCCL are like.
    pub(crate) rules: Rules,
    /// The kernels that were launched on a device.
    pub(crate) loaded: HashSet<(usize, u64)>,
    /// The release thresholds of the memory pools of devices.
    pub(crate) thresholds: HashMap<usize, u64>,
    queues: HardwareQueues,
    /// How many CTAs NCCL's kernels hold on each device.
    held: Vec<usize>,
}

static SIM: LazyLock<Mutex<Sim>> = LazyLock::new(|| Mutex::new(Sim::new(settings::seed())));
static CHANGED: Condvar = Condvar::new();

thread_local! {
    /// Whether this thread runs a host function of a stream.
    static IN_HOST_FUNCTION: Cell<bool> = const { Cell::new(false) };
}

/// Returns whether the calling thread is inside a host function, which must not call CUDA (cuLaunchHostFunc).
pub(crate) fn in_host_function() -> bool {
    IN_HOST_FUNCTION.get()
}

/// Returns the machine.
pub(crate) fn lock() -> MutexGuard<'static, Sim> {
    SIM.lock()
}

impl Sim {
    pub(crate) fn new(seed: u64) -> Self {
        Self {
            memory: Memory::default(),
            random: Random::new(seed),
            events: HashMap::new(),
            comms: Comms::default(),
            timeline: Timeline::default(),
            streams: BTreeMap::new(),
            implicit: HashMap::new(),
            host: Arc::default(),
            agents: 1,
            retired: Default::default(),
            next: 0x1000,
            policy: Policy::of(seed),
            progress: 0,
            idle: None,
            rules: Rules::of_process(),
            loaded: HashSet::new(),
            thresholds: HashMap::new(),
            queues: HardwareQueues::default(),
            held: vec![0; settings::get().gpus],
        }
    }

    /// A world begins, with a seed of its own: the first communicator when there are none.
    pub(crate) fn begin_world(&mut self) {
        let streams = &self.streams;
        self.memory.give_back(|stream| streams.contains_key(&(stream as u64)));
        self.comms.forget();
        let [new, old] = &mut self.retired;
        old.append(new);
        if let Some(seed) = settings::next_seed() {
            eprintln!("nccl-sim: a world with SIM_SEED={seed}");
            (self.random, self.policy) = (Random::new(seed), Policy::of(seed));
        }
    }

    /// Returns a fresh handle.
    pub(crate) fn handle(&mut self) -> u64 {
        self.next += 16;
        self.next
    }

    /// Deals a hardware queue to a stream of the default priority that NCCL makes for itself.
    pub(crate) fn deal(&mut self, device: usize) -> HardwareQueue {
        self.queues.deal(device, 0, self.rules.queues)
    }

    /// Lets the stream that has a hardware queue wait for a point.
    pub(crate) fn park(&mut self, queue: HardwareQueue, mark: &Mark) {
        self.queues.park(queue, mark.clone());
    }

    pub(crate) fn create(&mut self, device: usize, kind: StreamKind, priority: i32) -> u64 {
        let (id, turn) = (self.handle(), self.random.below(1 << 20));
        let line = self.queues.deal(device, priority, self.rules.queues);
        // An agent goes on with the time of its last stream, so its operations keep their numbers.
        let (agent, time) = self.retired[1].pop().unwrap_or((self.agents, 0));
        self.agents = self.agents.max(agent + 1);
        let (mut clock, tail) = (Clock::default(), Mark::default());
        clock.set(agent, time);
        let clock = Arc::new(clock);
        tail.pass(Arc::default(), 0.0);
        let stream = Stream {
            device,
            kind,
            clock,
            queue: VecDeque::new(),
            tail,
            ends_with_copy: false,
            gap: None,
            destroyed: false,
            turn,
            priority,
            line,
            agent,
            free: 0.0,
        };
        self.streams.insert(id, stream);
        id
    }

    /// Returns the stream that a handle means for the calling thread. "Default stream": 0 and 1 are the legacy stream,
    /// 2 is the stream of the thread that makes the call.
    pub(crate) fn resolve(&mut self, handle: u64, device: usize, thread: Thread) -> Option<u64> {
        let kind = match handle {
            0 | 1 => StreamKind::Legacy,
            2 => StreamKind::PerThread(thread),
            _ => return self.streams.get(&handle).filter(|stream| !stream.destroyed).map(|_| handle),
        };
        if let Some(&id) = self.implicit.get(&(device, kind)) {
            return Some(id);
        }
        let id = self.create(device, kind, 0);
        self.implicit.insert((device, kind), id);
        Some(id)
    }

    pub(crate) fn stream(&mut self, id: u64) -> Option<&mut Stream> {
        self.streams.get_mut(&id)
    }

    pub(crate) fn destroy(&mut self, id: u64) {
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.destroyed = true;
            if stream.queue.is_empty() {
                self.remove(id);
            }
        }
    }

    /// Forgets a destroyed stream whose work has ended.
    fn remove(&mut self, id: u64) {
        if let Some(Stream { agent, clock, .. }) = self.streams.remove(&id) {
            self.retired[0].push((agent, clock.get(agent)));
        }
    }

    /// Puts work at the end of a stream.
    pub(crate) fn enqueue(&mut self, id: u64, site: Arc<Site>, waits: Vec<Mark>, work: Work) -> Mark {
        let Some(stream) = self.streams.get(&id) else { return Mark::default() };
        if let Some(gap) = &stream.gap {
            // NCCL User Guide, "Group calls": until the state is success, nothing may be put on the streams.
            let key = format!("{} / {}", gap.call(), site.call());
            fault(Kind::Misuse, key, format!("{site} uses a stream on which NCCL still enqueues {gap}"));
        }
        let issued = self.timeline.now();
        self.append(id, site, waits, work, issued)
    }

    /// As [`enqueue`](Self::enqueue), for the simulator itself. The program made the call at `issued`.
    pub(crate) fn append(
        &mut self,
        id: u64,
        site: Arc<Site>,
        mut waits: Vec<Mark>,
        work: Work,
        issued: f64,
    ) -> Mark {
        let Some(stream) = self.streams.get(&id) else { return Mark::default() };
        let (device, kind) = (stream.device, stream.kind);
        // "Default stream": the legacy stream and the blocking streams of a device wait for each other.
        match kind {
            StreamKind::Legacy => {
                let blocking = |other: &&Stream| {
                    other.device == device
                        && matches!(other.kind, StreamKind::Blocking | StreamKind::PerThread(_))
                };
                waits.extend(self.streams.values().filter(blocking).map(|other| other.tail.clone()));
            }
            StreamKind::Blocking | StreamKind::PerThread(_) => {
                let legacy =
                    self.implicit.get(&(device, StreamKind::Legacy)).and_then(|id| self.streams.get(id));
                waits.extend(legacy.map(|legacy| legacy.tail.clone()));
            }
            StreamKind::NonBlocking => {}
        }
        let (host, mark) = (self.host.clone(), Mark::default());
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.tail = mark.clone();
            let marks_a_copy = stream.ends_with_copy && matches!(work, Work::Nothing) && waits.is_empty();
            stream.ends_with_copy = marks_a_copy || matches!(work, Work::Copy(_));
            let is_issued = marks_a_copy || !work.is_queued();
            if !is_issued {
                self.queues.add(stream.line, id);
            }
            stream.queue.push_back(Op { site, host, waits, work, mark: mark.clone(), is_issued, issued });
        }
        self.progress += 1;
        mark
    }

    /// Returns the last point of a stream.
    pub(crate) fn tail(&self, id: u64) -> Mark {
        self.streams.get(&id).map(|stream| stream.tail.clone()).unwrap_or_default()
    }

    /// Returns the last points of all streams of a device.
    pub(crate) fn tails(&self, device: usize) -> Vec<Mark> {
        self.streams
            .values()
            .filter(|stream| stream.device == device)
            .map(|stream| stream.tail.clone())
            .collect()
    }

    /// Returns whether the host has seen that `mark` is passed.
    pub(crate) fn has_seen(&self, mark: &Mark) -> bool {
        mark.passed().is_some_and(|clock| clock.is_within(&self.host))
    }

    /// The host has seen that `mark` is passed.
    pub(crate) fn saw(&mut self, mark: &Mark) {
        if let Some(clock) = mark.passed() {
            Arc::make_mut(&mut self.host).join(&clock);
            self.timeline.reaches(mark.at());
        }
    }
}

/// Returns how many blocks of memory and agents of clocks are kept.
#[cfg(test)]
pub(crate) fn kept() -> (usize, usize) {
    let sim = lock();
    (sim.memory.blocks(), sim.agents)
}

#[cfg(test)]
pub(crate) fn reset(seed: u64) {
    *lock() = Sim::new(seed);
    crate::report::take();
}
