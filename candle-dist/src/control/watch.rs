//! A process's side of the connection: what it has heard, and who waits for it.
use super::activity::{Activity, Meeting, Waiting};
use super::limits::{MAX_MESSAGE, MAX_ROUNDS, MAX_STATE, clipped};
use super::message::{Fault, Notice, Request, State};
use super::signature::Signature;
use crate::call::{Call, Form, Op};
use crate::error::End;
use crate::link::within;
use crate::link::{Event, Outbox};
use crate::values::{Change, Outcome};
use crate::{Cause, Error, GroupFailure, RankReport, Result};
use parking_lot::{Condvar, Mutex, MutexGuard};
use std::collections::HashMap;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

/// How long to wait until rank 0 has gathered the reports of all ranks, which takes it a third of a second.
const VERDICT: Duration = Duration::from_secs(5);

/// What one process knows.
#[derive(Debug)]
pub(super) struct Watch {
    rank: usize,
    size: usize,
    outbox: OnceLock<Outbox<Request>>,
    failure: OnceLock<Arc<GroupFailure>>,
    heard: Mutex<Heard>,
    changed: Condvar,
}

/// What rank 0 answers to a question about a value.
#[derive(Debug)]
enum Answer {
    Value(Vec<u8>),
    Absent,
    Changed(Outcome, Vec<u8>),
}

/// The error of an answer that belongs to another question.
fn unexpected() -> Error {
    Error::Unsupported("an answer of rank 0 to another question; run the same build on all hosts".to_string())
}

#[derive(Debug, Default)]
struct Heard {
    activity: Activity,
    /// All processes are there, and whether calls are compared.
    ready: Option<bool>,
    missing: Option<String>,
    /// What came, by the number of the question.
    answers: HashMap<u64, Answer>,
    questions: u64,
    /// What ranks entered that are about to end, as far as it has come.
    leaving: HashMap<usize, Vec<(u64, u64)>>,
    /// Rounds that are compared, and whether all members' calls are alike; those that somebody here will wait for.
    compared: HashMap<(u64, u64), bool>,
    /// Nobody needs this process any more.
    bye: bool,
    ended: bool,
}

/// What is made of a call that is entered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    /// It is told when somebody asks.
    Noted,
    /// It is compared with those of the other members.
    Compared,
    /// It is compared, and members that do not come are named.
    Monitored,
}

impl Watch {
    pub(super) fn new(rank: usize, size: usize) -> Self {
        Self {
            rank,
            size,
            outbox: OnceLock::new(),
            failure: OnceLock::new(),
            heard: Mutex::default(),
            changed: Condvar::new(),
        }
    }

    /// Sets where to send; nothing is sent before.
    pub(super) fn speak_through(&self, outbox: Outbox<Request>) {
        let _ = self.outbox.set(outbox);
    }

    fn send(&self, request: Request, payload: &[u8]) {
        if let Some(outbox) = self.outbox.get() {
            outbox.send_with(request, payload.into());
        }
    }

    pub(super) fn failure(&self) -> Option<&Arc<GroupFailure>> {
        self.failure.get()
    }

    /// Takes in what comes over the connection.
    pub(super) fn on(&self, event: Event<Notice>) {
        let mut heard = self.heard.lock();
        match event {
            Event::Message(Notice::Ready { debug }, _) => heard.ready = Some(debug),
            Event::Message(Notice::Missing(text), _) => heard.missing = Some(text),
            Event::Message(Notice::Value { id }, value) => drop(heard.answers.insert(id, Answer::Value(value))),
            Event::Message(Notice::Absent { id }, _) => drop(heard.answers.insert(id, Answer::Absent)),
            Event::Message(Notice::Changed { id, outcome }, bytes) => {
                heard.answers.insert(id, Answer::Changed(outcome, bytes));
            }
            Event::Message(Notice::Agreed { group, round }, _) => {
                if let Some(agreed) = heard.compared.get_mut(&(group, round)) {
                    *agreed = true;
                }
            }
            Event::Message(Notice::Left { rank, rounds, is_all }, _) => {
                heard.leaving.entry(rank).or_default().extend(rounds);
                if is_all {
                    let rounds = heard.leaving.remove(&rank).unwrap_or_default();
                    heard.activity.ended(rank, rounds);
                }
                if let Some(rank) = heard.activity.deserter() {
                    self.send(Request::Fail(Fault::Returned { rank }), &[]);
                }
            }
            Event::Message(Notice::Ask, _) => {
                self.send(Request::Report(clipped(heard.activity.to_string(), MAX_STATE)), &[]);
            }
            Event::Message(Notice::Stopped { fault, ranks }, _) => self.settle(fault.into(), ranks),
            Event::Message(Notice::Bye, _) => heard.bye = true,
            Event::Ended(how) => {
                heard.ended = true;
                if !heard.bye && heard.missing.is_none() {
                    let mut ranks = vec![State::Silent; self.size];
                    ranks[0] = State::Lost(how.clone());
                    self.settle(Cause::Lost { rank: 0, how }, ranks);
                }
            }
        }
        self.changed.notify_all();
    }

    /// The world has stopped; what was heard first counts.
    fn settle(&self, cause: Cause, ranks: Vec<State>) {
        let report = |(rank, state): (usize, State)| RankReport { rank, doing: state.into() };
        let ranks = ranks.into_iter().enumerate().map(report).collect();
        let _ = self.failure.set(Arc::new(GroupFailure { cause, ranks }));
    }

    fn check(&self) -> Result<()> {
        self.failure.get().map_or(Ok(()), |failure| Err(Error::Group(failure.clone())))
    }

    /// Waits until all processes are there; true if calls are compared.
    pub(super) fn meet(&self) -> Result<bool> {
        let mut heard = self.heard.lock();
        loop {
            if let Some(missing) = &heard.missing {
                return Err(Error::Init(missing.clone()));
            }
            self.check()?;
            if let Some(debug) = heard.ready {
                return Ok(debug);
            }
            self.changed.wait(&mut heard);
        }
    }

    /// Waits until `ready` gives a value, or the world has stopped, which it does itself after `timeout`.
    fn wait<R>(
        &self,
        mut heard: MutexGuard<'_, Heard>,
        timeout: Duration,
        mut ready: impl FnMut(&mut Heard) -> Option<R>,
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

    /// Like [`wait`](Self::wait); after `timeout` rank 0 stops the world over the members that are missing.
    fn wait_monitored<R>(
        &self,
        mut heard: MutexGuard<'_, Heard>,
        timeout: Duration,
        (group, round): (u64, u64),
        mut ready: impl FnMut(&mut Heard) -> Option<R>,
    ) -> Result<R> {
        let deadline = within(timeout);
        while Instant::now() < deadline && self.failure.get().is_none() {
            if let Some(value) = ready(&mut heard) {
                return Ok(value);
            }
            self.changed.wait_until(&mut heard, deadline);
        }
        self.send(Request::Miss { group, round, after: timeout }, &[]);
        // The last member may come at this very moment.
        self.wait(heard, VERDICT, ready)
    }

    /// Stops the world, unless it has stopped, and returns what stopped it.
    pub(super) fn fail(&self, cause: Cause) -> Error {
        let deadline = within(VERDICT);
        let mut heard = self.heard.lock();
        if self.failure.get().is_none() {
            self.send(Request::Fail(cause.clone().into()), &[]);
        }
        loop {
            if let Some(failure) = self.failure.get() {
                return Error::Group(failure.clone());
            }
            if self.changed.wait_until(&mut heard, deadline).timed_out() {
                self.settle(cause.clone(), vec![State::Silent; self.size]);
            }
        }
    }

    pub(super) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.check()?;
        self.send(Request::Set { key: key.to_string() }, value);
        Ok(())
    }

    pub(super) fn get(&self, key: &str, timeout: Duration) -> Result<Vec<u8>> {
        let answer = self.ask(
            key,
            |id, key| Request::Get { id, key },
            &[],
            |id, heard| self.wait(heard, timeout, |heard| heard.answers.remove(&id)),
        )?;
        match answer {
            Answer::Value(value) => Ok(value),
            Answer::Absent | Answer::Changed(..) => Err(unexpected()),
        }
    }

    /// The value, or `None` after `limit`.
    pub(super) fn get_within(&self, key: &str, limit: Duration, timeout: Duration) -> Result<Option<Vec<u8>>> {
        let deadline = within(limit);
        let answer = self.ask(
            key,
            |id, key| Request::Get { id, key },
            &[],
            |id, mut heard| {
                while Instant::now() < deadline && self.failure.get().is_none() {
                    if let Some(answer) = heard.answers.remove(&id) {
                        return Ok(answer);
                    }
                    self.changed.wait_until(&mut heard, deadline);
                }
                // Rank 0 answers either question, never both.
                self.send(Request::Forget { id, key: key.to_string() }, &[]);
                self.wait(heard, timeout, |heard| heard.answers.remove(&id))
            },
        )?;
        match answer {
            Answer::Value(value) => Ok(Some(value)),
            Answer::Absent => Ok(None),
            Answer::Changed(..) => Err(unexpected()),
        }
    }

    pub(super) fn change(
        &self,
        key: &str,
        change: &Change,
        bytes: &[u8],
        timeout: Duration,
    ) -> Result<(Outcome, Vec<u8>)> {
        let question = |id, key| Request::Change { id, key, change: change.clone() };
        let answer =
            self.ask(key, question, bytes, |id, heard| self.wait(heard, timeout, |heard| heard.answers.remove(&id)))?;
        match answer {
            Answer::Changed(outcome, bytes) => Ok((outcome, bytes)),
            Answer::Value(_) | Answer::Absent => Err(unexpected()),
        }
    }

    /// Asks rank 0 something about a key, and waits for the answer as `wait` does.
    fn ask<'a>(
        &'a self,
        key: &str,
        question: impl FnOnce(u64, String) -> Request,
        bytes: &[u8],
        wait: impl FnOnce(u64, MutexGuard<'a, Heard>) -> Result<Answer>,
    ) -> Result<Answer> {
        let mut heard = self.heard.lock();
        heard.questions += 1;
        let id = heard.questions;
        let doing = heard.activity.begin(Waiting::Value(clipped(key.to_string(), MAX_STATE)));
        self.send(question(id, key.to_string()), bytes);
        let answer = wait(id, heard);
        self.leave(doing);
        answer
    }

    /// Notes that the rank is in a call, and returns the number to [`leave`](Self::leave) with.
    ///
    /// What is compared is waited for; if that takes too long, a monitored call stops the world over those who are missing.
    pub(super) fn enter(&self, meeting: Meeting, call: &Call, how: How, timeout: Duration) -> Result<u64> {
        self.check()?;
        let mut heard = self.heard.lock();
        let key = (meeting.group, meeting.round);
        let is_new = heard.activity.count(key.0, key.1);
        let waits = call.op != Op::Send && !(is_new && call.form == Form::Started);
        if how != How::Noted && is_new {
            if call.op != Op::Send {
                heard.compared.insert(key, false);
            }
            self.send(Request::Enter(Box::new(Signature::new(key.0, &meeting.ranks, key.1, call))), &[]);
        }
        let doing = heard.activity.begin(Waiting::Call(Arc::new(call.clone()), waits.then_some(meeting)));
        if let Some(rank) = heard.activity.deserter() {
            drop(heard);
            let error = self.fail(Cause::Returned { rank });
            self.leave(doing);
            return Err(error);
        }
        if waits && heard.compared.contains_key(&key) {
            let agreed = |heard: &mut Heard| match heard.compared.get(&key) {
                Some(false) => None,
                _ => heard.compared.remove(&key),
            };
            let agreed = match how {
                How::Monitored => self.wait_monitored(heard, timeout, key, agreed),
                How::Noted | How::Compared => self.wait(heard, timeout, agreed),
            };
            if let Err(error) = agreed {
                self.leave(doing);
                return Err(error);
            }
        }
        Ok(doing)
    }

    /// Notes that the rank has done with a call.
    pub(super) fn leave(&self, doing: u64) {
        self.heard.lock().activity.end(doing);
    }

    /// The id of the next group of these members.
    pub(super) fn join(&self, ranks: &[usize]) -> u64 {
        self.heard.lock().activity.join(ranks)
    }

    /// The channel and the number of the next message.
    pub(super) fn message(&self, group: u64, from: usize, to: usize, tag: u32) -> (u64, u64) {
        self.heard.lock().activity.message(group, from, to, tag)
    }

    /// Forgets a group of `members` ranks; rank 0 remembers its rounds until all of them have.
    pub(super) fn forget(&self, group: u64, members: usize) {
        let mut heard = self.heard.lock();
        let rounds = heard.activity.forget(group);
        // What was started and never waited for.
        heard.compared.retain(|(id, _), _| *id != group && !rounds.iter().any(|(other, _)| other == id));
        if members > 1 {
            for some in rounds.chunks(MAX_ROUNDS) {
                self.send(Request::Dropped { group, members, rounds: some.to_vec(), is_all: false }, &[]);
            }
            self.send(Request::Dropped { group, members, rounds: Vec::new(), is_all: true }, &[]);
        }
    }

    /// Says goodbye, and waits at most `limit` until nobody needs this process any more.
    pub(super) fn part(&self, end: End, limit: Duration) {
        let deadline = within(limit);
        let mut heard = self.heard.lock();
        for rounds in heard.activity.rounds().chunks(MAX_ROUNDS) {
            self.send(Request::Rounds(rounds.to_vec()), &[]);
        }
        self.send(Request::Goodbye { end: end.clipped(MAX_MESSAGE) }, &[]);
        let is_free = |heard: &Heard| heard.bye || heard.ended || heard.missing.is_some();
        while !is_free(&heard) && !self.changed.wait_until(&mut heard, deadline).timed_out() {}
        // A connection that ends from now on has not been lost.
        heard.bye = true;
    }
}
