//! The order in which ranks of one process enqueue calls, where what waits on a GPU holds up what other ranks need.
//!
//! A kernel of NCCL's waits for those of the other members. What comes behind it on its stream stands at the head of a hardware queue
//! meanwhile, and NCCL lets a stream of its own wait for each kernel (`ncclLaunchFinish`). Two calls that ranks enqueue in unlike orders then
//! hold up each other where their streams share a queue. So a call that other ranks may enqueue in another order *begins* once for all of its
//! members, and none of them enqueues another call in between: the calls of two ranks have one order on both. It begins when all members
//! have come to it, and what comes before it has ended on their GPUs.
//!
//! | where | which calls wait until they begin |
//! |---|---|
//! | GPUs have fewer queues than we ask for | started calls, messages, and calls that a rank makes before those are enqueued. Others go ahead: what the rank does later comes after them on its GPU in any case |
//! | ranks share a GPU, and so its queues | all. And nothing waits for a call on the GPU before all members have enqueued it, because what waits may stand in front of what another member computes before its own part |
//!
//! Processes have queues of their own, and do not wait so.
use parking_lot::{Condvar, Mutex};
use rustc_hash::{FxHashMap, FxHashSet};
use std::collections::VecDeque;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

/// How long a member waits for the others before it looks for failures.
const TICK: Duration = Duration::from_millis(20);
/// How long it waits for the GPUs before it looks again.
const GLANCE: Duration = Duration::from_micros(100);

/// Returns whether what comes before a call has ended on the GPU.
type PriorCheck = Box<dyn Fn() -> bool + Send>;

/// The communicators of the ranks of a process, by name.
pub(crate) struct AssemblyTable {
    /// Whether ranks share a GPU.
    shares: bool,
    state: Mutex<AssemblyState>,
    changed: Condvar,
}

#[derive(Default)]
struct AssemblyState {
    comms: FxHashMap<u64, CallAssembly>,
    /// The ranks that have not enqueued a call which has begun.
    busy: FxHashSet<usize>,
}

/// The calls of a communicator.
struct CallAssembly {
    members: Vec<MemberCalls>,
    /// How many calls have begun.
    begun: u64,
    /// How many members are left.
    left: usize,
}

/// The calls of a member of a communicator.
#[derive(Default)]
struct MemberCalls {
    /// As a rank of the world.
    rank: usize,
    /// The calls that it has come to and that have not begun, and whether it waits for that.
    ready: VecDeque<(PriorCheck, bool)>,
    come: u64,
    enqueued: u64,
}

/// A member of a communicator that meets the others for calls.
pub(super) struct CallMember {
    name: u64,
    me: usize,
    table: Arc<AssemblyTable>,
}

/// A call that a member has come to.
#[derive(Debug, Clone, Copy)]
pub(super) struct MemberCall {
    number: u64,
    waits: bool,
}

/// The turn of a member to enqueue a call, until this is dropped.
pub(super) struct CallTurn<'a> {
    pub(super) member: &'a CallMember,
    pub(super) call: MemberCall,
}

impl Drop for CallTurn<'_> {
    fn drop(&mut self) {
        self.member.note_enqueued(self.call);
    }
}

impl AssemblyTable {
    /// Creates the table of a world. `shares` says whether some of its ranks share a GPU.
    pub(crate) fn new(shares: bool) -> Arc<Self> {
        Arc::new(Self { shares, state: Mutex::default(), changed: Condvar::new() })
    }

    /// Returns the member `me` of a communicator of these ranks.
    pub(super) fn member(self: &Arc<Self>, name: u64, ranks: &[usize], me: usize) -> CallMember {
        let of = |&rank: &usize| MemberCalls { rank, ..MemberCalls::default() };
        let new = || CallAssembly { members: ranks.iter().map(of).collect(), begun: 0, left: 0 };
        self.state.lock().comms.entry(name).or_insert_with(new).left += 1;
        CallMember { name, me, table: self.clone() }
    }
}

impl fmt::Debug for AssemblyTable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("AssemblyTable").field("shares", &self.shares).finish_non_exhaustive()
    }
}

impl AssemblyState {
    /// Lets the next call of a communicator begin, if it can. Returns whether all members have come to it.
    fn begin(&mut self, name: u64) -> bool {
        let Some(comm) = self.comms.get_mut(&name) else { return false };
        if comm.members.iter().any(|member| member.ready.is_empty()) {
            return false;
        }
        let waiting = |member: &MemberCalls| member.ready.front().is_some_and(|(_, waits)| *waits);
        let waiting: Vec<usize> =
            comm.members.iter().filter(|member| waiting(member)).map(|member| member.rank).collect();
        // Where no member waits, only the numbers of later calls depend on it.
        let has_ended = |member: &MemberCalls| member.ready.front().is_some_and(|(has_ended, _)| has_ended());
        if waiting.is_empty()
            || waiting.iter().all(|rank| !self.busy.contains(rank)) && comm.members.iter().all(has_ended)
        {
            comm.members.iter_mut().for_each(|member| _ = member.ready.pop_front());
            comm.begun += 1;
            self.busy.extend(waiting);
        }
        true
    }

    fn has_begun(&self, name: u64, call: u64) -> bool {
        self.comms.get(&name).is_none_or(|comm| comm.begun > call)
    }
}

impl CallMember {
    /// Returns whether all calls wait until they begin.
    pub(super) fn shares_gpu(&self) -> bool {
        self.table.shares
    }

    /// This member comes to its next call. `has_ended` says whether the work before the call has ended. If the call `waits`, the member
    /// enqueues it when it has begun; otherwise at once.
    pub(super) fn come(&self, waits: bool, has_ended: impl Fn() -> bool + Send + 'static) -> MemberCall {
        let mut state = self.table.state.lock();
        let mut number = 0;
        if let Some(comm) = state.comms.get_mut(&self.name) {
            let member = &mut comm.members[self.me];
            number = member.come;
            member.come += 1;
            member.ready.push_back((Box::new(has_ended), waits));
        }
        state.begin(self.name);
        drop(state);
        self.table.changed.notify_all();
        MemberCall { number, waits }
    }

    /// Returns whether this member may enqueue a call. Waits a little for it.
    pub(super) fn may_enqueue(&self, call: MemberCall) -> bool {
        let mut state = self.table.state.lock();
        let may = |state: &mut AssemblyState| {
            let all_are_here = state.begin(self.name);
            (!call.waits || state.has_begun(self.name, call.number), all_are_here)
        };
        let (mut is_turn, all_are_here) = may(&mut state);
        if !is_turn {
            self.table.changed.wait_for(&mut state, if all_are_here { GLANCE } else { TICK });
            is_turn = may(&mut state).0;
        }
        is_turn
    }

    /// Returns the turn of this member to enqueue a call. It may end before it has come.
    pub(super) fn turn(&self, call: MemberCall) -> CallTurn<'_> {
        CallTurn { member: self, call }
    }

    /// This member has enqueued a call, or will not.
    fn note_enqueued(&self, call: MemberCall) {
        let mut state = self.table.state.lock();
        let Some(comm) = state.comms.get_mut(&self.name) else { return };
        let member = &mut comm.members[self.me];
        member.enqueued += 1;
        let (rank, place) = (member.rank, call.number.checked_sub(comm.begun));
        match place.and_then(|place| member.ready.get_mut(usize::try_from(place).ok()?)) {
            Some((_, waits)) => *waits = false, // it has not begun, and nobody waits for that any more
            None if call.waits => _ = state.busy.remove(&rank),
            None => {}
        }
        drop(state);
        self.table.changed.notify_all();
    }

    /// Returns whether something may wait for a call on the GPU. Waits a little for it.
    pub(super) fn may_mark(&self, call: MemberCall) -> bool {
        let is_enqueued = |state: &mut AssemblyState| {
            let all = |comm: &CallAssembly| comm.members.iter().all(|member| member.enqueued > call.number);
            state.comms.get(&self.name).is_none_or(all)
        };
        let mut state = self.table.state.lock();
        if self.table.shares {
            self.table.changed.wait_while_for(&mut state, |state| !is_enqueued(state), TICK);
        }
        !self.table.shares || is_enqueued(&mut state)
    }
}

impl Drop for CallMember {
    fn drop(&mut self) {
        let mut state = self.table.state.lock();
        if let Some(comm) = state.comms.get_mut(&self.name) {
            comm.left -= 1;
            if comm.left == 0 {
                state.comms.remove(&self.name);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicBool, Ordering};

    fn come(member: &CallMember) -> MemberCall {
        member.come(true, || true)
    }

    #[test]
    fn members_meet_for_each_call_and_leave_nothing() {
        let table = AssemblyTable::new(true);
        let (first, second) = (table.member(7, &[0, 1], 0), table.member(7, &[0, 1], 1));
        let call = come(&first);
        assert!(first.shares_gpu() && !first.may_enqueue(call));
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| while !first.may_enqueue(call) {});
            let other = come(&second);
            waiting.join().expect("no panic");
            assert!(second.may_enqueue(other));
        });
        assert!(!first.may_mark(call));
        [&first, &second].iter().for_each(|member| drop(member.turn(call)));
        assert!(first.may_mark(call) && second.may_mark(call));
        let next = come(&second);
        assert!(!second.may_enqueue(next), "the next call");
        drop((first, second));
        assert!(table.state.lock().comms.is_empty());
    }

    #[test]
    fn calls_of_two_groups_have_one_order_on_all_ranks() {
        let table = AssemblyTable::new(false);
        let [a, b] = [7, 8].map(|name| [0, 1].map(|me| table.member(name, &[4, 5], me)));
        // Each rank comes to them in another order.
        let calls = [come(&a[0]), come(&b[1]), come(&b[0]), come(&a[1])];
        assert!(b[0].may_enqueue(calls[2]) && !a[0].may_enqueue(calls[0]) && !a[1].may_enqueue(calls[3]));
        drop(b[0].turn(calls[2]));
        assert!(!a[0].may_enqueue(calls[0]), "the other member has not enqueued the first one");
        assert!(b[1].may_enqueue(calls[1]));
        drop(b[1].turn(calls[1]));
        assert!(a[0].may_enqueue(calls[0]) && a[1].may_enqueue(calls[3]));
        let elsewhere = [0, 1].map(|me| table.member(9, &[6, 7], me));
        let others = [come(&elsewhere[0]), come(&elsewhere[1])];
        assert!(elsewhere[0].may_enqueue(others[0]), "those of other ranks do not wait");
    }

    #[test]
    fn a_call_that_waits_begins_after_the_work_before_it() {
        let table = AssemblyTable::new(false);
        let members = [0, 1].map(|me| table.member(7, &[0, 1], me));
        let is_done = Arc::new(AtomicBool::new(false));
        let of_gpu = is_done.clone();
        let ahead = members[0].come(false, move || of_gpu.load(Ordering::Relaxed));
        assert!(members[0].may_enqueue(ahead), "it goes ahead");
        drop(members[0].turn(ahead));
        let behind = come(&members[1]);
        assert!(!members[1].may_enqueue(behind));
        is_done.store(true, Ordering::Relaxed);
        assert!(members[1].may_enqueue(behind) && members[1].may_mark(behind));
        drop(members[1].turn(behind));
        // A member that gives up holds up no other call.
        drop(members[1].turn(come(&members[1])));
        drop(members[0].turn(members[0].come(false, || true)));
        assert!(table.state.lock().busy.is_empty());
        // Calls for which nobody waits are not kept.
        for _ in 0..3 {
            members.iter().for_each(|member| drop(member.turn(member.come(false, || false))));
        }
        assert!(table.state.lock().comms[&7].members.iter().all(|member| member.ready.is_empty()));
    }
}
