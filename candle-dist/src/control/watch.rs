//! A process's side of the connection: what it has heard, and who waits for it.
use super::activity::{Activity, Meeting, Waiting};
use super::message::{Fault, MAX_MESSAGE, MAX_STATE, Notice, Request, State, clipped};
use super::signature::Signature;
use crate::backend::{Call, Form, Op};
use crate::store::link::{Event, Outbox};
use crate::store::within;
use crate::world::End;
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

#[derive(Debug, Default)]
struct Heard {
    activity: Activity,
    /// All processes are there, and whether calls are compared.
    ready: Option<bool>,
    missing: Option<String>,
    /// Values that came, by the number of the question.
    values: HashMap<u64, Vec<u8>>,
    questions: u64,
    /// Rounds that are compared, and whether all members' calls are alike; those that somebody here will wait for.
    compared: HashMap<(u64, u64), bool>,
    /// Nobody needs this process any more.
    bye: bool,
    ended: bool,
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
            Event::Message(Notice::Value { id }, value) => {
                heard.values.insert(id, value);
            }
            Event::Message(Notice::Agreed { group, round }, _) => {
                if let Some(agreed) = heard.compared.get_mut(&(group, round)) {
                    *agreed = true;
                }
            }
            Event::Message(Notice::Left { rank, rounds }, _) => {
                heard.activity.ended(rank, rounds);
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
        let mut heard = self.heard.lock();
        heard.questions += 1;
        let id = heard.questions;
        let doing = heard.activity.begin(Waiting::Value(clipped(key.to_string(), MAX_STATE)));
        self.send(Request::Get { id, key: key.to_string() }, &[]);
        let value = self.wait(heard, timeout, |heard| heard.values.remove(&id));
        self.leave(doing);
        value
    }

    /// Notes that the rank is in a call, and returns the number to [`leave`](Self::leave) with.
    pub(super) fn enter(&self, meeting: Meeting, call: &Call, debug: bool, timeout: Duration) -> Result<u64> {
        self.check()?;
        let mut heard = self.heard.lock();
        let key = (meeting.group, meeting.round);
        let is_new = heard.activity.count(key.0, key.1);
        let waits = call.op != Op::Send && !(is_new && call.form == Form::Started);
        if debug && is_new {
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
            let agreed = self.wait(heard, timeout, |heard| match heard.compared.get(&key) {
                Some(false) => None,
                _ => heard.compared.remove(&key),
            });
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

    /// Says goodbye, and waits at most `limit` until nobody needs this process any more.
    pub(super) fn part(&self, end: End, limit: Duration) {
        let deadline = within(limit);
        let mut heard = self.heard.lock();
        self.send(Request::Goodbye { end: end.clipped(MAX_MESSAGE), rounds: heard.activity.rounds() }, &[]);
        let is_free = |heard: &Heard| heard.bye || heard.ended || heard.missing.is_some();
        while !is_free(&heard) && !self.changed.wait_until(&mut heard, deadline).timed_out() {}
        // A connection that ends from now on has not been lost.
        heard.bye = true;
    }
}
