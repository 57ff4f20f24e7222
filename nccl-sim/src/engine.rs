//! Streams, and the order in which their work runs: any order that CUDA allows, chosen by the seed.
use crate::clock::{Clock, Mark};
use crate::memory::{Accessor, Memory};
use crate::nccl::{Comms, Launch};
use crate::report::{Kind, Site, die, fault};
use crate::settings;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::cell::Cell;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::sync::{Arc, LazyLock};
use std::thread::ThreadId;
use std::time::{Duration, Instant};

/// The kinds of streams. CUDA Driver API, "Stream synchronization behavior".
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) enum StreamKind {
    /// Waits for all blocking streams of the device, and they for it.
    Legacy,
    /// Blocking, and one for each host thread.
    PerThread(ThreadId),
    Blocking,
    NonBlocking,
}

/// What an operation does when its turn comes.
pub(crate) enum Work {
    /// Only marks a point.
    Nothing,
    Run(Box<dyn FnOnce(&mut Exec<'_>) + Send>),
    Host(HostCall),
    Nccl(Box<Launch>),
}

/// A host function with its argument.
pub(crate) struct HostCall(pub(crate) extern "C" fn(*mut std::ffi::c_void), pub(crate) usize);

struct Op {
    site: Arc<Site>,
    /// What the host had seen when it made the call.
    host: Arc<Clock>,
    waits: Vec<Mark>,
    work: Work,
    mark: Mark,
}

pub(crate) struct Stream {
    pub(crate) device: usize,
    pub(crate) kind: StreamKind,
    clock: Arc<Clock>,
    queue: VecDeque<Op>,
    /// The last operation.
    tail: Mark,
    /// The NCCL call that is still being enqueued by NCCL's thread; nothing else may be put on the stream.
    pub(crate) gap: Option<Arc<Site>>,
    destroyed: bool,
    priority: u64,
    /// The position among the agents of clocks.
    agent: usize,
}

/// An operation that runs: its access to memory.
pub(crate) struct Exec<'a> {
    memory: &'a mut Memory,
    who: Accessor<'a>,
    pub(crate) device: usize,
}

impl Exec<'_> {
    /// Notes a read of bytes that [`peek`](Self::peek) then returns.
    pub(crate) fn note_read(&mut self, address: u64, len: usize) -> bool {
        len == 0 || self.memory.note_read(address, len, self.device, &self.who)
    }

    pub(crate) fn peek(&mut self, address: u64, len: usize) -> Option<Vec<u8>> {
        if len == 0 {
            return Some(Vec::new());
        }
        self.memory.peek(address, len, self.device, &self.who).map(<[u8]>::to_vec)
    }

    pub(crate) fn read(&mut self, address: u64, len: usize) -> Option<Vec<u8>> {
        if self.note_read(address, len) { self.peek(address, len) } else { None }
    }

    pub(crate) fn write(&mut self, address: u64, data: &[u8]) {
        if !data.is_empty() {
            self.memory.write(address, data.len(), Some(data), self.device, &self.who);
        }
    }

    pub(crate) fn begin(&mut self, address: u64) {
        self.memory.begin(address, &self.who);
    }

    pub(crate) fn end(&mut self, address: u64) {
        self.memory.end(address, &self.who);
    }

    pub(crate) fn site(&self) -> &Arc<Site> {
        self.who.site
    }
}

/// How streams make progress.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum Policy {
    /// Everything runs as soon as it can.
    Eager,
    /// Nothing runs before a thread waits.
    Lazy,
    /// A random number of operations runs after each call.
    Random,
    /// As `Random`, and the stream with the highest priority goes first; priorities change at random.
    Priorities,
}

/// A small random generator (xorshift).
pub(crate) struct Random(u64);

impl Random {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ 0x2545_f491_4f6c_dd1d)
    }

    pub(crate) fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) % n.max(1)
    }
}

/// An event: the point of its latest record, with the time at which it was passed.
#[derive(Clone, Default)]
pub(crate) struct Event {
    pub(crate) mark: Option<Mark>,
}

/// The whole simulated machine.
pub(crate) struct Sim {
    pub(crate) memory: Memory,
    pub(crate) random: Random,
    pub(crate) events: HashMap<u64, Event>,
    pub(crate) comms: Comms,
    streams: BTreeMap<u64, Stream>,
    /// The streams that exist by themselves, by device and kind.
    implicit: HashMap<(usize, StreamKind), u64>,
    host: Arc<Clock>,
    agents: usize,
    next: u64,
    policy: Policy,
    /// How many operations have run or been enqueued.
    pub(crate) progress: u64,
    /// The NCCL kernels that run now on each device.
    running: Vec<usize>,
}

static SIM: LazyLock<Mutex<Sim>> = LazyLock::new(|| Mutex::new(Sim::new(settings::get().seed)));
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
        let policy = [Policy::Eager, Policy::Lazy, Policy::Random, Policy::Priorities][(seed % 4) as usize];
        Self {
            memory: Memory::default(),
            random: Random::new(seed),
            events: HashMap::new(),
            comms: Comms::default(),
            streams: BTreeMap::new(),
            implicit: HashMap::new(),
            host: Arc::default(),
            agents: 1,
            next: 0x1000,
            policy,
            progress: 0,
            running: vec![0; settings::get().gpus],
        }
    }

    /// Returns a fresh handle.
    pub(crate) fn handle(&mut self) -> u64 {
        self.next += 16;
        self.next
    }

    pub(crate) fn create(&mut self, device: usize, kind: StreamKind) -> u64 {
        let (id, agent, priority) = (self.handle(), self.agents, self.random.below(1 << 20));
        self.agents += 1;
        let (clock, tail) = (Arc::default(), Mark::default());
        tail.pass(Arc::default());
        let stream =
            Stream { device, kind, clock, queue: VecDeque::new(), tail, gap: None, destroyed: false, priority, agent };
        self.streams.insert(id, stream);
        id
    }

    /// Returns the stream that a handle means for the calling thread. "Default stream": 0 and 1 are the legacy stream,
    /// 2 is the stream of the thread that makes the call.
    pub(crate) fn resolve(&mut self, handle: u64, device: usize, thread: ThreadId) -> Option<u64> {
        let kind = match handle {
            0 | 1 => StreamKind::Legacy,
            2 => StreamKind::PerThread(thread),
            _ => return self.streams.get(&handle).filter(|stream| !stream.destroyed).map(|_| handle),
        };
        if let Some(&id) = self.implicit.get(&(device, kind)) {
            return Some(id);
        }
        let id = self.create(device, kind);
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
                self.streams.remove(&id);
            }
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
        self.append(id, site, waits, work)
    }

    /// As [`enqueue`](Self::enqueue), for the simulator itself.
    pub(crate) fn append(&mut self, id: u64, site: Arc<Site>, mut waits: Vec<Mark>, work: Work) -> Mark {
        let Some(stream) = self.streams.get(&id) else { return Mark::default() };
        let (device, kind) = (stream.device, stream.kind);
        // "Default stream": the legacy stream and the blocking streams of a device wait for each other.
        match kind {
            StreamKind::Legacy => {
                let blocking = |other: &&Stream| {
                    other.device == device && matches!(other.kind, StreamKind::Blocking | StreamKind::PerThread(_))
                };
                waits.extend(self.streams.values().filter(blocking).map(|other| other.tail.clone()));
            }
            StreamKind::Blocking | StreamKind::PerThread(_) => {
                let legacy = self.implicit.get(&(device, StreamKind::Legacy)).and_then(|id| self.streams.get(id));
                waits.extend(legacy.map(|legacy| legacy.tail.clone()));
            }
            StreamKind::NonBlocking => {}
        }
        let (host, mark) = (self.host.clone(), Mark::default());
        if let Some(stream) = self.streams.get_mut(&id) {
            stream.tail = mark.clone();
            stream.queue.push_back(Op { site, host, waits, work, mark: mark.clone() });
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
        self.streams.values().filter(|stream| stream.device == device).map(|stream| stream.tail.clone()).collect()
    }

    /// The host has seen that `mark` is passed.
    pub(crate) fn saw(&mut self, mark: &Mark) {
        if let Some(clock) = mark.passed() {
            Arc::make_mut(&mut self.host).join(&clock);
        }
    }

    /// Returns whether the first operation of a stream can run.
    fn is_ready(&self, stream: &Stream) -> bool {
        let Some(op) = stream.queue.front() else { return false };
        if !op.waits.iter().all(Mark::is_passed) {
            return false;
        }
        match &op.work {
            Work::Nccl(launch) => {
                let room = self.running[stream.device] < settings::get().capacity;
                self.comms.can_advance(launch, room)
            }
            _ => true,
        }
    }

    /// Runs the first operation of a stream, or a part of it.
    fn advance(&mut self, id: u64) {
        let Some(stream) = self.streams.get_mut(&id) else { return };
        let Some(mut op) = stream.queue.pop_front() else { return };
        self.progress += 1;
        let (device, agent) = (stream.device, stream.agent);
        let mut clock = stream.clock.clone();
        {
            let clock = Arc::make_mut(&mut clock);
            clock.join(&op.host);
            for wait in &op.waits {
                if let Some(earlier) = wait.passed() {
                    clock.join(&earlier);
                }
            }
            clock.set(agent, clock.get(agent) + 1);
        }
        let mut again = false;
        match op.work {
            Work::Nothing => {}
            Work::Run(run) => {
                let who = Accessor { clock: &clock, agent, site: &op.site };
                run(&mut Exec { memory: &mut self.memory, who, device });
                op.work = Work::Nothing;
            }
            Work::Host(HostCall(function, argument)) => {
                IN_HOST_FUNCTION.set(true);
                function(argument as *mut std::ffi::c_void);
                IN_HOST_FUNCTION.set(false);
                op.work = Work::Nothing;
            }
            Work::Nccl(ref mut launch) => {
                let started = launch.started;
                again = !self.comms.advance(launch, &mut self.memory, &mut clock, agent, device, &op.site);
                match (started, again) {
                    (false, true) => self.running[device] += 1,
                    (true, false) => self.running[device] -= 1,
                    _ => {}
                }
            }
        }
        let Some(stream) = self.streams.get_mut(&id) else { return };
        stream.clock = clock.clone();
        if again {
            stream.queue.push_front(op);
            return;
        }
        op.mark.pass(clock);
        if stream.destroyed && stream.queue.is_empty() {
            self.streams.remove(&id);
        }
    }

    /// Runs one operation. Returns whether there was one that could run.
    pub(crate) fn step(&mut self) -> bool {
        let ready: Vec<u64> =
            self.streams.iter().filter(|(_, stream)| self.is_ready(stream)).map(|(&id, _)| id).collect();
        if ready.is_empty() {
            return false;
        }
        let at = match self.policy {
            Policy::Priorities => {
                let chosen = ready.iter().max_by_key(|id| self.streams.get(id).map(|stream| stream.priority));
                let chosen = *chosen.unwrap_or(&ready[0]);
                if self.random.below(16) == 0 {
                    let priority = self.random.below(1 << 20);
                    self.streams.entry(chosen).and_modify(|stream| stream.priority = priority);
                }
                chosen
            }
            _ => ready[self.random.below(ready.len() as u64) as usize],
        };
        self.advance(at);
        true
    }

    /// Lets streams advance after a call of the host.
    pub(crate) fn after_call(&mut self) {
        let steps = match self.policy {
            Policy::Eager => u64::MAX,
            Policy::Lazy => 0,
            Policy::Random | Policy::Priorities => self.random.below(4),
        };
        let mut done = 0;
        while done < steps && self.step() {
            done += 1;
        }
        CHANGED.notify_all();
    }

    /// Lets streams advance while the host polls.
    pub(crate) fn while_polling(&mut self) {
        self.comms.poll();
        Comms::launch_due(self);
        for _ in 0..self.random.below(4) {
            if !self.step() {
                break;
            }
        }
        CHANGED.notify_all();
    }

    /// Describes what every stream waits for.
    fn blocked(&self) -> String {
        let heads = self.streams.iter().filter_map(|(id, stream)| Some((id, stream, stream.queue.front()?)));
        let line = |(id, stream, op): (&u64, &Stream, &Op)| {
            let why = match &op.work {
                Work::Nccl(launch) if launch.started => self.comms.lacks(launch),
                Work::Nccl(_) => "no room on the device".to_string(),
                _ => "another stream".to_string(),
            };
            format!("\n  GPU {} stream {id:#x} {:?}: {} waits for {why}", stream.device, stream.kind, op.site)
        };
        heads.map(line).collect()
    }
}

/// Waits until `done`, while streams advance. Ends the process if nothing can happen any more.
pub(crate) fn wait(sim: &mut MutexGuard<'static, Sim>, what: &Arc<Site>, mut done: impl FnMut(&Sim) -> bool) {
    let (mut progress, mut since) = (sim.progress, Instant::now());
    while !done(sim) {
        sim.comms.poll();
        Comms::launch_due(sim);
        if sim.step() {
            CHANGED.notify_all();
            // Other threads must be able to enqueue work in between.
            MutexGuard::bump(sim);
            continue;
        }
        CHANGED.wait_for(sim, Duration::from_millis(2));
        if sim.progress != progress {
            (progress, since) = (sim.progress, Instant::now());
        } else if since.elapsed() >= settings::get().hang {
            let text = format!("{what} waits, and nothing can run:{}", sim.blocked());
            fault(Kind::Deadlock, what.call(), &text);
            die("ended after a deadlock");
        }
    }
}

/// Starts a thread that advances the streams, for processes that wait for each other.
pub(crate) fn keep_running() {
    static STARTED: std::sync::Once = std::sync::Once::new();
    STARTED.call_once(|| {
        let run = || loop {
            std::thread::sleep(Duration::from_micros(300));
            lock().while_polling();
        };
        if std::thread::Builder::new().name("nccl-sim".into()).spawn(run).is_err() {
            die("no thread");
        }
    });
}

#[cfg(test)]
pub(crate) fn reset(seed: u64) {
    *lock() = Sim::new(seed);
    crate::report::take();
}
