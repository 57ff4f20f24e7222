//! A process's side of the connection: what it has received, and the threads that wait for it.
mod later;
#[cfg(feature = "nccl")]
mod posts;
mod values;

use super::activity::{Activity, Meeting, WaitKind};
use super::limits::{MAX_MESSAGE, MAX_ROUNDS, MAX_STATE, clipped};
use super::message::{CauseRecord, HubRequest, Notice, StatusRecord};
use super::signature::RoundEntry;
use crate::call::{Call, Form, Op};
use crate::error::End;
use crate::link::within;
use crate::link::{LinkEvent, Outbox};
use crate::values::ChangeOutcome;
use crate::{Cause, Error, GroupFailure, RankReport, Result, printable};
use later::LaterCalls;
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::{HashMap, HashSet};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long to wait for rank 0 to gather the reports of all ranks, which takes a third of a second.
pub(super) const VERDICT: Duration = Duration::from_secs(5);

/// How many calls of a rank may wait for their comparison, which bounds the memory for them here and at rank 0.
const MAX_LATER: usize = 4096;

/// The state of one process.
#[derive(Debug)]
pub(super) struct Watch {
    rank: usize,
    size: usize,
    outbox: OnceLock<Outbox<HubRequest>>,
    failure: OnceLock<Arc<GroupFailure>>,
    /// Whether somebody here has asked for the failure and got it.
    told: AtomicBool,
    heard: Mutex<HubReport>,
    changed: Condvar,
}

/// An answer of rank 0 to a request about a value.
#[derive(Debug)]
enum ValueReply {
    Value(Vec<u8>),
    Absent,
    Changed(ChangeOutcome, Vec<u8>),
}

#[derive(Debug, Default)]
struct HubReport {
    activity: Activity,
    /// Whether all processes have joined.
    ready: bool,
    not_started: Option<String>,
    /// The received answers, by request number.
    answers: HashMap<u64, ValueReply>,
    questions: u64,
    /// The rounds of ranks that are about to end, as far as received.
    leaving: HashMap<usize, Vec<(u64, u64)>>,
    /// The rounds that are compared and that a thread here waits for, with whether all members' calls are equal.
    compared: HashMap<(u64, u64), bool>,
    /// The collectives that are compared while this rank goes on, until all members' calls are equal.
    later: LaterCalls,
    /// The receives that are compared while this rank goes on. A send is not among them, because nobody may receive it.
    received: HashSet<(u64, u64)>,
    /// How many messages of each channel the other end has enqueued, and whether it sends them.
    posted: HashMap<(u64, bool), u64>,
    /// Whether this process has said goodbye.
    announced: bool,
    /// Whether a call has told this rank of the failure before its goodbye, so that it has handled it or reports it.
    knew: bool,
    /// Whether this process may end.
    bye: bool,
    /// Whether this process ends the connection.
    parted: bool,
    ended: bool,
}

/// How the entry into a call is handled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EntryMode {
    /// Reported only when rank 0 asks.
    Noted,
    /// Compared with the calls of the other members.
    Compared,
    /// Compared, without waiting for it.
    ComparedLater,
    /// Compared, and members that do not arrive are named.
    Monitored,
}

impl HubReport {
    /// Returns how many calls are compared while this rank goes on.
    fn count_later(&self) -> usize {
        self.later.len() + self.received.len()
    }
}

impl Watch {
    pub(super) fn new(rank: usize, size: usize) -> Self {
        Self {
            rank,
            size,
            outbox: OnceLock::new(),
            failure: OnceLock::new(),
            told: AtomicBool::new(false),
            heard: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Sets the outgoing queue; nothing is sent before.
    pub(super) fn speak_through(&self, outbox: Outbox<HubRequest>) {
        let _ = self.outbox.set(outbox);
    }

    /// Tells rank 0 the digests of the arguments of this process, which it compares before the world starts.
    pub(super) fn present(&self, arguments: Option<Vec<String>>) {
        self.send(HubRequest::Arguments(arguments), &[]);
    }

    fn send(&self, request: HubRequest, payload: &[u8]) {
        if let Some(outbox) = self.outbox.get() {
            outbox.send_with(request, payload.into());
        }
    }

    pub(super) fn failure(&self) -> Option<&Arc<GroupFailure>> {
        self.failure.get().inspect(|_| self.told.store(true, Ordering::Relaxed))
    }

    /// Handles an event of the connection.
    pub(super) fn on(&self, event: LinkEvent<Notice>) {
        let mut heard = self.heard.lock();
        match event {
            LinkEvent::Message(Notice::Ready, _) => heard.ready = true,
            LinkEvent::Message(Notice::NotStarted(text), _) => {
                heard.not_started = Some(printable(&text).into());
            }
            LinkEvent::Message(Notice::Value { id }, value) => {
                drop(heard.answers.insert(id, ValueReply::Value(value)));
            }
            LinkEvent::Message(Notice::Absent { id }, _) => {
                drop(heard.answers.insert(id, ValueReply::Absent));
            }
            LinkEvent::Message(Notice::Changed { id, outcome }, bytes) => {
                heard.answers.insert(id, ValueReply::Changed(outcome, bytes));
            }
            LinkEvent::Message(Notice::Equal { group, round }, _) => heard.later.settle(group, round, true),
            LinkEvent::Message(Notice::Show { group, round }, _) => {
                if let Some(entry) = heard.later.entry(group, round) {
                    self.send(HubRequest::Enter(Box::new(entry)), &[]);
                }
            }
            LinkEvent::Message(Notice::Posted { channel, number, sends }, _) => {
                let count = heard.posted.entry((channel, sends)).or_default();
                *count = (*count).max(number.saturating_add(1));
            }
            LinkEvent::Message(Notice::Agreed { group, round }, _) => {
                heard.received.remove(&(group, round));
                heard.later.settle(group, round, false);
                if let Some(agreed) = heard.compared.get_mut(&(group, round)) {
                    *agreed = true;
                }
            }
            LinkEvent::Message(Notice::Left { rank, rounds, is_all }, _) => {
                heard.leaving.entry(rank).or_default().extend(rounds);
                if is_all {
                    let rounds = heard.leaving.remove(&rank).unwrap_or_default();
                    heard.activity.ended(rank, rounds);
                }
                if let Some(rank) = heard.activity.deserter() {
                    self.send(HubRequest::Fail(CauseRecord::Returned { rank }), &[]);
                }
            }
            LinkEvent::Message(Notice::Ask, _) => {
                self.send(HubRequest::Report(clipped(heard.activity.to_string(), MAX_STATE)), &[]);
            }
            LinkEvent::Message(Notice::Stopped { fault, ranks }, _) => self.settle(fault.into(), ranks),
            LinkEvent::Message(Notice::Bye, _) => heard.bye = true,
            LinkEvent::Ended(how) => {
                heard.ended = true;
                // Rank 0 keeps the connection until this process ends it, also after the goodbye.
                if !heard.parted && heard.not_started.is_none() {
                    let mut ranks = self.alone(&heard);
                    ranks[0] = StatusRecord::Lost(how.clone());
                    let cause = Cause::Lost { rank: 0, how };
                    // If rank 0 is frozen, it finds this when it wakes, and ends like the others.
                    self.send(HubRequest::Fail(cause.clone().into()), &[]);
                    self.settle(cause, ranks);
                }
                if let Some(outbox) = self.outbox.get() {
                    outbox.close();
                }
            }
        }
        self.changed.notify_all();
    }

    /// Returns the states of all ranks when nobody else tells any.
    fn alone(&self, heard: &HubReport) -> Vec<StatusRecord> {
        let mut ranks = vec![StatusRecord::Silent; self.size];
        ranks[self.rank] = StatusRecord::Says(clipped(heard.activity.to_string(), MAX_STATE));
        ranks
    }

    /// Records that the world has stopped; the first failure received counts.
    fn settle(&self, cause: Cause, ranks: Vec<StatusRecord>) {
        let report = |(rank, state): (usize, StatusRecord)| RankReport { rank, doing: state.into() };
        let ranks = ranks.into_iter().enumerate().map(report).collect();
        let _ = self.failure.set(Arc::new(GroupFailure { cause, ranks }));
    }

    fn check(&self) -> Result<()> {
        self.failure().map_or(Ok(()), |failure| Err(Error::Group(failure.clone())))
    }

    /// Waits until all processes have joined, for at most `limit`: rank 0 says before whether some are missing.
    pub(super) fn meet(&self, limit: Duration) -> Result<()> {
        let deadline = within(limit);
        let mut heard = self.heard.lock();
        loop {
            if let Some(why) = &heard.not_started {
                return Err(Error::NotStarted(why.clone()));
            }
            self.check()?;
            if heard.ready {
                return Ok(());
            }
            if Instant::now() >= deadline {
                return Err(Error::Init(format!(
                    "rank 0 has let rank {} of {} in, and has neither started the world nor ended it within {limit:?}; give \
                     all ranks the same InitOptions::init_timeout, and see what rank 0 does",
                    self.rank, self.size
                )));
            }
            self.changed.wait_until(&mut heard, deadline);
        }
    }

    /// Waits until `ready` returns a value or the world stops. After `timeout` it stops the world.
    fn wait<R>(
        &self,
        mut heard: MutexGuard<'_, HubReport>,
        timeout: Duration,
        mut ready: impl FnMut(&mut HubReport) -> Option<R>,
    ) -> Result<R> {
        let deadline = within(timeout);
        loop {
            self.check()?;
            if let Some(value) = ready(&mut heard) {
                return Ok(value);
            }
            if Instant::now() >= deadline {
                drop(heard);
                return Err(self.fail(Cause::TimedOut { rank: self.rank, after: timeout }));
            }
            self.changed.wait_until(&mut heard, deadline);
        }
    }

    /// Like [`wait`](Self::wait), but after `timeout` rank 0 stops the world because of the missing members.
    fn wait_monitored<R>(
        &self,
        mut heard: MutexGuard<'_, HubReport>,
        timeout: Duration,
        (group, round): (u64, u64),
        mut ready: impl FnMut(&mut HubReport) -> Option<R>,
    ) -> Result<R> {
        let deadline = within(timeout);
        while Instant::now() < deadline && self.failure.get().is_none() {
            if let Some(value) = ready(&mut heard) {
                return Ok(value);
            }
            self.changed.wait_until(&mut heard, deadline);
        }
        self.send(HubRequest::Miss { group, round, after: timeout }, &[]);
        // The last member may arrive just now.
        self.wait(heard, VERDICT, ready)
    }

    /// Stops the world, unless it has stopped, and returns the cause.
    pub(super) fn fail(&self, cause: Cause) -> Error {
        let deadline = within(VERDICT);
        let mut heard = self.heard.lock();
        if self.failure.get().is_none() {
            self.send(HubRequest::Fail(cause.clone().into()), &[]);
        }
        loop {
            if let Some(failure) = self.failure() {
                return Error::Group(failure.clone());
            }
            if self.changed.wait_until(&mut heard, deadline).timed_out() {
                self.settle(cause.clone(), self.alone(&heard));
            }
        }
    }

    /// Records that the rank is in a call. Returns the number for [`leave`](Self::leave).
    ///
    /// Waits if the call is compared. A monitored call that takes too long stops the world and names the missing
    /// members.
    pub(super) fn enter(
        &self,
        meeting: Meeting,
        call: &Arc<Call>,
        how: EntryMode,
        timeout: Duration,
    ) -> Result<u64> {
        self.check()?;
        let mut heard = self.heard.lock();
        let key = (meeting.group, meeting.round);
        let is_new = heard.activity.count(key.0, key.1);
        let waits = call.op() != Op::Send && !(is_new && call.form == Form::Started);
        if how != EntryMode::Noted && is_new {
            let is_message = call.collective.is_message();
            if how == EntryMode::ComparedLater && !is_message {
                if heard.later.push(key.0, &meeting.ranks, key.1, call) {
                    self.tell_of(&mut heard);
                }
            } else {
                if how == EntryMode::ComparedLater && call.op() != Op::Send {
                    heard.received.insert(key);
                } else if call.op() != Op::Send {
                    heard.compared.insert(key, false);
                }
                // The calls of a rank come to rank 0 in their order.
                self.tell_of(&mut heard);
                let entry = RoundEntry::new(key.0, &meeting.ranks, key.1, call);
                self.send(HubRequest::Enter(Box::new(entry)), &[]);
            }
        }
        let doing = heard.activity.begin(WaitKind::Call(call.clone(), waits.then_some(meeting)));
        if let Some(rank) = heard.activity.deserter() {
            drop(heard);
            let error = self.fail(Cause::Returned { rank });
            self.leave(doing);
            return Err(error);
        }
        if heard.count_later() > MAX_LATER {
            self.tell_of(&mut heard);
            let compared =
                self.wait(heard, timeout, |heard| (heard.count_later() <= MAX_LATER).then_some(()));
            return compared.map(|()| doing).inspect_err(|_| self.leave(doing));
        }
        if waits && heard.compared.contains_key(&key) {
            let agreed = |heard: &mut HubReport| match heard.compared.get(&key) {
                Some(false) => None,
                _ => heard.compared.remove(&key),
            };
            let agreed = match how {
                EntryMode::Monitored => self.wait_monitored(heard, timeout, key, agreed),
                EntryMode::Noted | EntryMode::Compared | EntryMode::ComparedLater => {
                    self.wait(heard, timeout, agreed)
                }
            };
            if let Err(error) = agreed {
                self.leave(doing);
                return Err(error);
            }
        }
        Ok(doing)
    }

    /// Waits until all calls that are compared later are known to be equal.
    pub(super) fn agree(&self, timeout: Duration) -> Result<()> {
        let mut heard = self.heard.lock();
        self.tell_of(&mut heard);
        if heard.count_later() == 0 {
            return Ok(());
        }
        self.wait(heard, timeout, |heard| (heard.count_later() == 0).then_some(()))
    }

    /// Tells rank 0 of the calls that it has not been told of.
    #[cfg(feature = "nccl")]
    pub(super) fn tell_calls(&self) {
        self.tell_of(&mut self.heard.lock());
    }

    fn tell_of(&self, heard: &mut HubReport) {
        heard.later.take().into_iter().for_each(|request| self.send(request, &[]));
    }

    /// Records that the rank is in a stage of its start. Returns the number for [`leave`](Self::leave).
    pub(super) fn begin(&self, stage: &str) -> u64 {
        self.heard.lock().activity.begin(WaitKind::Stage(stage.to_string()))
    }

    /// Returns whether a rank has ended.
    #[cfg(feature = "nccl")]
    pub(super) fn has_anyone_left(&self) -> bool {
        self.heard.lock().activity.has_anyone_left()
    }

    /// Returns whether a rank has ended without entering this round.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub(super) fn has_left(&self, rank: usize, group: u64, round: u64) -> bool {
        self.heard.lock().activity.lacks(rank, &Meeting::new(group, &[], round))
    }

    /// Records that the rank has left a call.
    pub(super) fn leave(&self, doing: u64) {
        self.heard.lock().activity.end(doing);
    }

    /// Returns the id of the next group of these members.
    pub(super) fn join(&self, ranks: &[usize]) -> u64 {
        self.heard.lock().activity.join(ranks)
    }

    /// Returns the channel and the number of the next message.
    pub(super) fn message(&self, group: u64, from: usize, to: usize, tag: u32) -> (u64, u64) {
        self.heard.lock().activity.message(group, from, to, tag)
    }

    /// Forgets a group of `members` ranks, and `channels` with it. Rank 0 remembers its rounds until all members have
    /// forgotten it.
    pub(super) fn forget(&self, group: u64, channels: &[u64], members: usize) {
        let mut heard = self.heard.lock();
        let rounds = heard.activity.forget(group, channels);
        // Removes calls that were started but never waited for.
        heard.compared.retain(|(id, _), _| *id != group && !rounds.iter().any(|(other, _)| other == id));
        if members > 1 {
            for some in rounds.chunks(MAX_ROUNDS) {
                self.send(HubRequest::Dropped { group, members, rounds: some.to_vec(), is_all: false }, &[]);
            }
            self.send(HubRequest::Dropped { group, members, rounds: Vec::new(), is_all: true }, &[]);
        }
    }

    /// Says goodbye, once. This process still hears of the others.
    pub(super) fn announce(&self, end: End) {
        let mut heard = self.heard.lock();
        if std::mem::replace(&mut heard.announced, true) {
            return;
        }
        heard.knew = self.told.load(Ordering::Relaxed);
        for rounds in heard.activity.rounds().chunks(MAX_ROUNDS) {
            self.send(HubRequest::Rounds(rounds.to_vec()), &[]);
        }
        self.send(HubRequest::Goodbye { end: end.clipped(MAX_MESSAGE) }, &[]);
    }

    /// Waits after the goodbye until all ranks have said goodbye or the world stops. Has no time limit, because ranks may
    /// compute alone; their heartbeats say that they live.
    pub(super) fn outlast(&self) -> Result<()> {
        let mut heard = self.heard.lock();
        while self.failure.get().is_none() && !heard.ended && heard.activity.count_left() < self.size {
            self.changed.wait(&mut heard);
        }
        match self.failure.get().map(|failure| &failure.cause) {
            None => Ok(()),
            Some(Cause::Lost { .. } | Cause::Failed { .. } | Cause::Panicked { .. }) => self.check(),
            // Its program has had the error, and has returned all the same.
            Some(_) if heard.knew => Ok(()),
            // Those that waited for it know better whether it was right to return.
            Some(Cause::Returned { rank }) if *rank == self.rank => Ok(()),
            Some(_) => self.check(),
        }
    }

    /// Waits at most `limit` after the goodbye until this process may end.
    pub(super) fn part(&self, limit: Duration) {
        let deadline = within(limit);
        let mut heard = self.heard.lock();
        let is_free = |heard: &HubReport| heard.bye || heard.ended;
        while !is_free(&heard) && !self.changed.wait_until(&mut heard, deadline).timed_out() {}
        // From now on, the end of the connection is not a failure.
        heard.parted = true;
        self.send(HubRequest::Gone, &[]);
    }
}
