//! The shared state of the ranks of one world: which ranks run, what each waits for, and the failure that stopped all.
use super::rendezvous::GroupState;
use super::rounds::Round;
use crate::backend::Call;
use crate::error::End;
use crate::{Cause, Error, GroupFailure, RankReport, RankStatus, Result};
use crossbeam_utils::CachePadded;
use parking_lot::Mutex;
use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::thread::ThreadId;
use std::time::Duration;

/// The state shared by the ranks of a local world.
pub(crate) struct WorldState {
    timeout: Duration,
    /// The bytes that may be unread between two ranks of a group.
    mailbox: usize,
    /// Whether there are more ranks than cores: spinning would keep the awaited rank from running.
    crowded: bool,
    failed: AtomicBool,
    failure: OnceLock<Arc<GroupFailure>>,
    returned: Box<[AtomicBool]>,
    activity: Box<[CachePadded<Mutex<MemberActivity>>]>,
    table: Mutex<MemberTable>,
    registry: Mutex<Registry>,
}

/// The communication of one rank.
#[derive(Default)]
struct MemberActivity {
    call: Option<Arc<Call>>,
    inside: bool,
    thread: Option<ThreadId>,
}

/// The condition for which a parked rank waits.
#[derive(Clone)]
pub(super) struct Wait {
    pub(super) group: Arc<GroupState>,
    pub(super) on: WaitCondition,
}

/// The conditions for which a rank can wait in a group.
#[derive(Clone)]
pub(super) enum WaitCondition {
    /// All members entered this round.
    Entered(Round),
    /// The same, and the error names missing members.
    Monitored(Round),
    /// All members have read the tensors they need from this round.
    Left(Round),
    /// A message has arrived.
    Message { from: usize, to: usize, tag: u32 },
    /// A message from any member has arrived.
    AnyMessage { to: usize, tag: u32 },
    /// At most `allowed` bytes are unread between two members.
    Room { from: usize, to: usize, allowed: usize },
}

struct MemberTable {
    ends: Vec<Option<End>>,
    waits: Vec<Option<Wait>>,
    /// Whether several threads communicate for one rank, so that a parked thread says nothing about its rank.
    threaded: bool,
}

#[derive(Default)]
struct Registry {
    /// How often a rank joined a group of these members.
    joined: HashMap<(usize, Vec<usize>), u64>,
    /// Groups that some members have not joined yet.
    open: HashMap<(Vec<usize>, u64), (Arc<GroupState>, usize)>,
    all: Vec<Weak<GroupState>>,
}

impl WorldState {
    pub(crate) fn new(size: usize, timeout: Duration, mailbox: usize) -> Arc<Self> {
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        Arc::new(Self {
            timeout,
            mailbox,
            crowded: size > cores,
            failed: AtomicBool::new(false),
            failure: OnceLock::new(),
            returned: (0..size).map(|_| AtomicBool::new(false)).collect(),
            activity: (0..size).map(|_| CachePadded::default()).collect(),
            table: Mutex::new(MemberTable {
                ends: vec![None; size],
                waits: vec![None; size],
                threaded: false,
            }),
            registry: Mutex::default(),
        })
    }

    pub(crate) fn size(&self) -> usize {
        self.returned.len()
    }

    pub(crate) fn timeout(&self) -> Duration {
        self.timeout
    }

    pub(super) fn mailbox(&self) -> usize {
        self.mailbox
    }

    pub(super) fn crowded(&self) -> bool {
        self.crowded
    }

    pub(super) fn is_failed(&self) -> bool {
        self.failed.load(Ordering::Acquire)
    }

    pub(crate) fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.failure.get().cloned()
    }

    /// Returns an error if the world has stopped.
    pub(crate) fn check(&self) -> Result<()> {
        match self.failure.get() {
            Some(failure) => Err(Error::Group(failure.clone())),
            None => Ok(()),
        }
    }

    /// Stops the world. The first cause wins; every rank gets it.
    pub(crate) fn fail(&self, cause: Cause) -> Error {
        let failure =
            self.failure.get_or_init(|| Arc::new(GroupFailure { cause, ranks: self.reports() })).clone();
        self.failed.store(true, Ordering::Release);
        self.notify_all();
        Error::Group(failure)
    }

    fn reports(&self) -> Vec<RankReport> {
        let ends = self.table.lock().ends.clone();
        let doing = |rank: usize, end: Option<End>| match end {
            Some(End::Returned) => RankStatus::Returned,
            Some(End::Failed(message)) => RankStatus::Failed(message),
            Some(End::Panicked(message)) => RankStatus::Panicked(message),
            None => {
                let activity = self.activity[rank].lock();
                match (&activity.call, activity.inside) {
                    (Some(call), true) => RankStatus::In(call.clone()),
                    (call, _) => RankStatus::Running(call.clone()),
                }
            }
        };
        ends.into_iter().enumerate().map(|(rank, end)| RankReport { rank, doing: doing(rank, end) }).collect()
    }

    fn notify_all(&self) {
        let groups: Vec<_> = self.registry.lock().all.iter().filter_map(Weak::upgrade).collect();
        for group in groups {
            group.notify();
        }
    }

    /// Makes the current thread the rank's main thread: while another one waits, the rank may still run.
    pub(crate) fn settle_thread(&self, rank: usize) {
        self.activity[rank].lock().thread = Some(std::thread::current().id());
    }

    /// Records that `rank` begins a call.
    pub(crate) fn begin(&self, rank: usize, call: &Arc<Call>) {
        thread_local!(static ME: ThreadId = std::thread::current().id());
        let me = ME.with(|me| *me);
        let mut activity = self.activity[rank].lock();
        if *activity.thread.get_or_insert(me) != me {
            self.table.lock().threaded = true;
        }
        if !activity.call.as_ref().is_some_and(|last| Arc::ptr_eq(last, call)) {
            activity.call = Some(call.clone());
        }
        activity.inside = true;
    }

    /// Records that `rank` completed its call.
    pub(crate) fn complete(&self, rank: usize) {
        self.activity[rank].lock().inside = false;
    }

    /// Records how `rank` ended. Errors and panics stop the world at once, a plain return only ranks that wait for it.
    pub(crate) fn end(&self, rank: usize, end: End) {
        let cause = end.cause(rank);
        let mut table = self.table.lock();
        table.ends[rank] = Some(end);
        if table.ends.iter().all(Option::is_some) {
            // Groups that some members never joined refer to the world, as it refers to them.
            self.registry.lock().open.clear();
        }
        match cause {
            Some(cause) => {
                drop(table);
                self.fail(cause);
            }
            None => {
                self.returned[rank].store(true, Ordering::Release);
                drop(table);
                self.notify_all();
            }
        }
    }

    /// Returns whether the rank ended without an error. (A failed rank has stopped the world itself, with its own
    /// cause.)
    pub(crate) fn has_returned(&self, rank: usize) -> bool {
        self.returned[rank].load(Ordering::Acquire)
    }

    pub(super) fn set_wait(&self, rank: usize, wait: Option<Wait>) {
        self.table.lock().waits[rank] = wait;
    }

    /// Returns whether every rank has returned or waits for something that no running rank will bring about.
    ///
    /// Not if a rank failed, or returned while another waits for it: that is the cause, and will be reported.
    pub(super) fn is_stuck(&self) -> bool {
        let table = self.table.lock();
        !table.threaded
            && table.ends.iter().zip(&table.waits).all(|(end, wait)| match (end, wait) {
                (Some(End::Returned), _) => true,
                (None, Some(wait)) => !wait.group.is_ready(&wait.on) && !wait.group.is_deserted(&wait.on),
                (Some(_), _) | (None, None) => false,
            })
    }

    /// Returns the group of `ranks` that `rank` joins now: its n-th group of these members is every member's n-th.
    pub(super) fn join(
        &self,
        rank: usize,
        ranks: &[usize],
        make: impl FnOnce() -> GroupState,
    ) -> Arc<GroupState> {
        let mut registry = self.registry.lock();
        let nth = registry.joined.entry((rank, ranks.to_vec())).or_default();
        *nth += 1;
        let key = (ranks.to_vec(), *nth);
        let mut fresh = None;
        let (group, members) = registry.open.entry(key.clone()).or_insert_with(|| {
            let group = Arc::new(make());
            fresh = Some(Arc::downgrade(&group));
            (group, 0)
        });
        *members += 1;
        let (group, complete) = (group.clone(), *members == ranks.len());
        if complete {
            registry.open.remove(&key);
        }
        if let Some(fresh) = fresh {
            registry.all.retain(|g| g.strong_count() > 0);
            registry.all.push(fresh);
        }
        group
    }
}

/// Reports to the world how its rank ended, also when the rank's thread unwinds.
pub(crate) struct RankGuard {
    world: Arc<WorldState>,
    rank: usize,
    has_ended: bool,
}

impl RankGuard {
    pub(crate) fn new(world: Arc<WorldState>, rank: usize) -> Self {
        Self { world, rank, has_ended: false }
    }

    /// Makes the current thread the rank's own.
    pub(crate) fn settle_thread(&self) {
        self.world.settle_thread(self.rank);
    }

    /// Says how the rank ends. A drop without it is a plain return or a panic.
    pub(crate) fn finish(&mut self, end: End) {
        if !std::mem::replace(&mut self.has_ended, true) {
            self.world.end(self.rank, end);
        }
    }
}

impl Drop for RankGuard {
    fn drop(&mut self) {
        self.finish(End::of_thread());
    }
}
