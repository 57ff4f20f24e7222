//! Rank 0's side: the processes, the values and rounds that they wait for, and the failure of the world.
use super::arguments;
use super::departed::Departures;
use super::digests::{CallDigests, DigestOutcome};
use super::limits::{MAX_ROUNDS, MAX_STATE};
use super::message::{CauseRecord, HubRequest, Notice, StatusRecord};
use super::rounds::Rounds;
use super::terms::Terms;
use crate::Cause;
use crate::error::End;
use crate::launch::{InitOptions, LaunchInfo, SecretFile};
use crate::link::hello::{Guest, Hello, HelloReply};
use crate::link::key::JobKey;
use crate::link::within;
use crate::link::{Link, LinkEvent};
use crate::values::{ChangeEffects, Values};
use itertools::Itertools;
use parking_lot::{Condvar, Mutex};
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the ranks have to report what they are doing when the world stops.
const ANSWER: Duration = Duration::from_millis(300);

/// The state of all processes at rank 0.
#[derive(Debug)]
pub(super) struct ControlHub {
    key: JobKey,
    table: Mutex<HubTable>,
    changed: Condvar,
}

#[derive(Debug)]
struct HubTable {
    phase: WorldPhase,
    /// Why the world has not started, if something went wrong before. Processes that come later hear it.
    not_started: Option<String>,
    /// The file of the secret, while ranks may come.
    file: Option<SecretFile>,
    /// Whether all processes find the secret that one launcher starts for this address.
    is_of_launcher: bool,
    terms: Terms,
    /// The arguments of rank 0, unless others may have unlike ones.
    arguments: Option<Vec<String>>,
    seats: Vec<RankRecord>,
    values: Values<(usize, u64)>,
    rounds: Rounds,
    digests: CallDigests,
    departed: Departures,
}

/// The phase of a world, which only advances.
#[derive(Debug)]
enum WorldPhase {
    Meeting,
    Running,
    /// Something went wrong, and the ranks are asked what they are doing.
    Stopping(CauseRecord),
    Stopped,
    /// The ranks cannot start.
    NotStarted,
    /// Rank 0 ends.
    Over,
}

/// The state of one rank.
#[derive(Debug, Default)]
struct RankRecord {
    link: Option<Link<Notice>>,
    is_open: bool,
    /// Whether the rank was refused because the world has not started.
    is_refused: bool,
    /// Whether the rank's arguments are known and like those of rank 0.
    is_alike: bool,
    end: Option<End>,
    /// Whether the rank has ended the connection itself.
    is_gone: bool,
    lost: Option<String>,
    says: Option<String>,
    /// The rounds that the rank had entered, as reported before its goodbye.
    rounds: Vec<(u64, u64)>,
}

impl RankRecord {
    fn send(&self, notice: &Notice) {
        if let (Some(link), true) = (&self.link, self.is_open) {
            link.outbox.send(notice.clone());
        }
    }

    fn has_ended(&self) -> bool {
        self.end.is_some() || !self.is_open
    }

    fn state(&self) -> StatusRecord {
        match (&self.end, &self.lost, &self.says) {
            (Some(end), ..) => StatusRecord::Ended(end.clone().clipped(MAX_STATE)),
            (_, Some(how), _) => StatusRecord::Lost(how.clone()),
            (.., Some(text)) => StatusRecord::Says(text.clone()),
            _ => StatusRecord::Silent,
        }
    }
}

impl HubTable {
    fn tell(&self, notice: &Notice) {
        self.seats.iter().for_each(|seat| seat.send(notice));
    }

    /// Stops the world unless it is stopping already: the first cause counts.
    fn stop(&mut self, cause: Cause) {
        if let WorldPhase::Meeting | WorldPhase::Running = self.phase {
            if let WorldPhase::Meeting = self.phase {
                self.not_started = Some(cause.to_string());
            }
            self.phase = WorldPhase::Stopping(cause.into());
            self.tell(&Notice::Ask);
        }
    }

    fn is_busy(&self) -> bool {
        self.seats.iter().any(|seat| seat.is_open)
    }

    /// After a failure, releases the processes once all of them have been told and have ended. If the world has not started, rank 0
    /// waits for those that still come, for as long as a process waits for its release.
    fn release(&self) {
        let has_failed = matches!(self.phase, WorldPhase::Stopped | WorldPhase::NotStarted);
        let is_done =
            |seat: &RankRecord| if seat.link.is_some() { seat.has_ended() } else { seat.is_refused };
        if has_failed && self.seats.iter().all(is_done) {
            self.tell(&Notice::Bye);
        }
    }

    /// Returns whether a process of this job may join.
    fn answer(&self, hello: Hello) -> HelloReply {
        let (rank, size) = (hello.rank as usize, self.seats.len());
        if hello.size as usize != size {
            let theirs = hello.size;
            let fix = "start all with one size";
            return HelloReply::Never(format!(
                "this process counts {theirs} ranks and rank 0 counts {size}; {fix}"
            ));
        }
        let Some(seat) = self.seats.get(rank) else {
            return HelloReply::Never(format!(
                "this process has rank {rank} of {size}; ranks go from 0 to {}",
                size - 1
            ));
        };
        if let Some(why) = &self.not_started {
            return HelloReply::NotStarted(why.clone());
        }
        let is_over = matches!(self.phase, WorldPhase::Stopping(_) | WorldPhase::Stopped | WorldPhase::Over);
        match (&seat.link, &seat.end) {
            (None, _) if matches!(self.phase, WorldPhase::Meeting) => HelloReply::Welcome(self.terms.text()),
            (_, Some(End::Returned)) if !is_over => HelloReply::Later(format!(
                "rank {rank} was here and has left; a running world accepts no processes, so start the whole job again"
            )),
            (Some(_), _) if !is_over => HelloReply::Never(format!(
                "rank {rank} is here already; give every process a rank of its own"
            )),
            _ => HelloReply::Later(format!(
                "the world that rank {rank} wants to join is ending; start the whole job again"
            )),
        }
    }

    /// Stops the world if a second process of the same launcher comes as one of its ranks. Then the launcher has started two
    /// jobs at one address, and nobody knows to which job each of the other processes belongs.
    fn suspect(&mut self, hello: Hello, answer: &HelloReply) {
        let rank = hello.rank as usize;
        let is_twin = self.is_of_launcher
            && matches!(answer, HelloReply::Never(_))
            && hello.size as usize == self.seats.len();
        if !is_twin || self.seats.get(rank).is_none_or(|seat| seat.link.is_none()) {
            return;
        }
        let why = format!(
            "two processes of one launcher came as rank {rank}: two jobs use one address, and their ranks may be mixed; give \
             each job a MASTER_PORT or a CANDLE_DIST_TOKEN of its own"
        );
        match self.phase {
            WorldPhase::Meeting => self.call_off(why),
            _ => self.stop(Cause::Failed { rank, message: why }),
        }
    }

    /// Tells all processes, also those that come later, why the world does not start.
    fn call_off(&mut self, why: String) {
        self.tell(&Notice::NotStarted(why.clone()));
        self.not_started = Some(why);
        self.phase = WorldPhase::NotStarted;
    }

    /// Notes that a rank has heard why the world does not start.
    fn refused(&mut self, rank: usize) {
        self.seats[rank].is_refused = true;
        self.release();
    }

    /// Returns the error for all ranks if some ranks did not join.
    fn missing(&self, limit: Duration) -> String {
        let missing = self.seats.iter().positions(|seat| !seat.is_alike).collect_vec();
        let ranks = if missing.len() == 1 { "rank" } else { "ranks" };
        format!(
            "{ranks} {} of {} did not come within {limit:?}; check that they were started and reach rank 0 under the \
             same address and with the same secret",
            missing.iter().format(", "),
            self.seats.len()
        )
    }
}

impl ControlHub {
    pub(super) fn new(
        info: &LaunchInfo,
        key: JobKey,
        file: Option<SecretFile>,
        options: &InitOptions,
    ) -> Self {
        let seats = (0..info.world_size).map(|_| RankRecord::default()).collect();
        let table = HubTable {
            phase: WorldPhase::Meeting,
            not_started: None,
            file,
            is_of_launcher: info.secret.is_of_launcher(),
            terms: Terms::of_first(options),
            arguments: arguments::own(options),
            seats,
            values: Values::default(),
            rounds: Rounds::default(),
            digests: CallDigests::default(),
            departed: Departures::default(),
        };
        Self { key, table: Mutex::new(table), changed: Condvar::new() }
    }

    /// Returns the key of this job.
    pub(super) fn key(&self) -> &JobKey {
        &self.key
    }

    /// Answers a process of this job: lets it join, or tells it why it may not.
    pub(super) fn admit(self: &Arc<Self>, guest: &Guest, stream: TcpStream) -> io::Result<()> {
        let mut table = self.table.lock();
        let answer = table.answer(guest.hello);
        table.suspect(guest.hello, &answer);
        self.changed.notify_all();
        let (hub, rank) = (self.clone(), guest.hello.rank as usize);
        if !matches!(answer, HelloReply::Welcome(_)) {
            guest.answer(&self.key, &answer, &mut &stream)?;
            if matches!(answer, HelloReply::NotStarted(_)) {
                table.refused(rank);
            }
            return Ok(());
        }
        let mut welcome = Vec::new();
        guest.answer(&self.key, &answer, &mut welcome)?;
        match Link::start(stream.try_clone()?, table.terms.lost_after, welcome, move |event| {
            hub.on(rank, event);
        }) {
            Ok(link) => {
                table.seats[rank] = RankRecord { link: Some(link), is_open: true, ..RankRecord::default() }
            }
            // A process that is let in does not come again, so it is told why the world does not start, like the others.
            Err(error) => {
                let why = format!(
                    "rank 0 cannot start the threads for rank {rank}: {error}; raise the limit on threads (ulimit -u, \
                     pids.max of the cgroup) or on memory"
                );
                table.call_off(why.clone());
                self.changed.notify_all();
                guest.answer(&self.key, &HelloReply::NotStarted(why), &mut &stream)?;
                table.refused(rank);
                return Ok(());
            }
        }
        self.changed.notify_all();
        Ok(())
    }

    /// Handles an event of a rank's connection.
    fn on(&self, rank: usize, event: LinkEvent<HubRequest>) {
        let mut table = self.table.lock();
        match event {
            LinkEvent::Message(request, payload) => table.request(rank, request, payload),
            LinkEvent::Ended(how) => {
                table.seats[rank].is_open = false;
                let seat = &table.seats[rank];
                // If the others have given up rank 0, which was frozen, they are not the lost ones.
                let gives_up =
                    matches!(&table.phase, WorldPhase::Stopping(CauseRecord::Lost { rank: 0, .. }));
                // After its goodbye, a rank may have died with messages that others wait for.
                if !gives_up
                    && (seat.end.is_none() || matches!(seat.end, Some(End::Returned)) && !seat.is_gone)
                {
                    table.seats[rank].lost = Some(how.clone());
                    table.stop(Cause::Lost { rank, how });
                }
                table.release();
            }
        }
        self.changed.notify_all();
    }

    /// Waits for the events of the whole world: the end of the start, which has `limit` until `deadline`, and a failure.
    pub(super) fn supervise(&self, limit: Duration, deadline: Instant) {
        let mut table = self.table.lock();
        while matches!(table.phase, WorldPhase::Meeting) {
            if self.changed.wait_until(&mut table, deadline).timed_out()
                && matches!(table.phase, WorldPhase::Meeting)
            {
                let why = table.missing(limit);
                table.call_off(why);
            }
        }
        while matches!(table.phase, WorldPhase::Running) {
            self.changed.wait(&mut table);
        }
        let WorldPhase::Stopping(fault) = &table.phase else { return };
        let fault = fault.clone();
        let deadline = within(ANSWER);
        let owes = |seat: &RankRecord| !seat.has_ended() && seat.says.is_none();
        while table.seats.iter().any(owes) && !self.changed.wait_until(&mut table, deadline).timed_out() {}
        let mut ranks = table.seats.iter().map(RankRecord::state).collect_vec();
        // A frozen rank 0 may have gone on since it woke, but that is what the others know of it.
        if let CauseRecord::Lost { rank: 0, how } = &fault {
            ranks[0] = StatusRecord::Lost(how.clone());
        }
        let stopped = Notice::Stopped { fault, ranks };
        for seat in &table.seats {
            if let Some(link) = &seat.link {
                // Also if it is frozen: it finds this when it wakes, and ends like the others.
                link.outbox.send(stopped.clone());
                if !seat.is_open {
                    link.outbox.close();
                }
            }
        }
        table.phase = WorldPhase::Stopped;
        table.release();
        self.changed.notify_all();
    }

    /// Waits until all processes have ended, or the world stops. Has no time limit, because ranks may compute alone.
    pub(super) fn stay(&self) {
        let mut table = self.table.lock();
        while matches!(table.phase, WorldPhase::Running) && table.is_busy() {
            self.changed.wait(&mut table);
        }
    }

    /// Closes the connections when all processes have ended, at the latest after `farewell`.
    pub(super) fn finish(&self, farewell: Duration) {
        let mut table = self.table.lock();
        let deadline = within(farewell);
        while table.is_busy() && !self.changed.wait_until(&mut table, deadline).timed_out() {}
        table.phase = WorldPhase::Over;
        table.file = None;
        self.changed.notify_all();
        let links = table.seats.iter_mut().filter_map(|seat| seat.link.take()).collect_vec();
        drop(table);
        links.into_iter().for_each(Link::finish);
    }
}

impl HubTable {
    fn request(&mut self, rank: usize, request: HubRequest, payload: Vec<u8>) {
        match request {
            HubRequest::Arguments(theirs) if matches!(self.phase, WorldPhase::Meeting) => {
                if let Some(why) = arguments::difference(rank, theirs.as_deref(), self.arguments.as_deref()) {
                    return self.call_off(why);
                }
                self.seats[rank].is_alike = true;
                if self.seats.iter().all(|seat| seat.is_alike) {
                    self.phase = WorldPhase::Running;
                    self.tell(&Notice::Ready);
                }
            }
            HubRequest::Arguments(_) => {}
            HubRequest::Get { id, key } => {
                if let Some(value) = self.values.get(key, (rank, id)) {
                    self.give(rank, id, value);
                }
            }
            HubRequest::Forget { id, key } => {
                if self.values.forget(&key, &(rank, id)) {
                    self.seats[rank].send(&Notice::Absent { id });
                }
            }
            HubRequest::Change { id, key, change } => {
                let ChangeEffects { outcome, bytes, woken } =
                    self.values.change(key, &change, &payload, rank);
                if let Some(link) = &self.seats[rank].link {
                    link.outbox.send_with(Notice::Changed { id, outcome }, bytes);
                }
                if let Some((value, waiting)) = woken {
                    waiting.into_iter().for_each(|(rank, id)| self.give(rank, id, value.clone()));
                }
            }
            HubRequest::Enter(signature) => {
                let (group, round) = (signature.group, signature.round);
                let is_message = signature.tag().is_some();
                let entered = self.rounds.enter(rank, *signature);
                if !is_message {
                    let shown = self.digests.show(group, round);
                    self.compared(group, shown);
                }
                let Some(calls) = entered else { return };
                match calls.mismatch() {
                    None => {
                        calls.members().for_each(|(rank, group, round)| {
                            self.seats[rank].send(&Notice::Agreed { group, round });
                        });
                        if !is_message {
                            let settled = self.digests.settle(group, round);
                            self.compared(group, settled);
                        }
                    }
                    Some(mismatch) => {
                        // A rank that did not have to wait may have moved on, so report the call that it made.
                        for (rank, text) in mismatch.calls {
                            self.seats[rank].says = Some(format!("in {text}"));
                        }
                        self.stop(mismatch.cause);
                    }
                }
            }
            HubRequest::Calls { group, ranks, calls } => {
                let rounds = &self.rounds;
                let is_shown = |round| rounds.has(group, round);
                let found = self.digests.add(rank, group, &ranks, calls, is_shown);
                self.compared(group, found);
            }
            HubRequest::Post { peer, channel, number, sends } => {
                if let Some(seat) = self.seats.get(peer) {
                    seat.send(&Notice::Posted { channel, number, sends });
                }
            }
            HubRequest::Miss { group, round, after } => {
                // If the round is gone, its last member has just entered.
                if let Some(ranks) = self.rounds.missing(group, round) {
                    self.stop(Cause::Missing { ranks, after });
                }
            }
            HubRequest::Fail(fault) => self.stop(fault.into()),
            HubRequest::Report(text) => {
                self.seats[rank].says.get_or_insert(text);
            }
            HubRequest::Dropped { group, members, rounds, is_all } => {
                self.departed.note(rank, group, members, rounds, is_all);
            }
            HubRequest::Rounds(rounds) => self.seats[rank].rounds.extend(rounds),
            HubRequest::Gone => self.seats[rank].is_gone = true,
            HubRequest::Goodbye { end } => {
                let cause = end.cause(rank);
                self.seats[rank].end = Some(end);
                match (&self.phase, cause) {
                    (WorldPhase::Meeting | WorldPhase::Running, None) => {
                        let mut rounds = std::mem::take(&mut self.seats[rank].rounds);
                        rounds.extend(self.departed.of(rank));
                        for some in rounds.chunks(MAX_ROUNDS) {
                            self.tell(&Notice::Left { rank, rounds: some.to_vec(), is_all: false });
                        }
                        self.tell(&Notice::Left { rank, rounds: Vec::new(), is_all: true });
                        self.seats[rank].send(&Notice::Bye);
                    }
                    (_, Some(cause)) => self.stop(cause),
                    (_, None) => {}
                }
                self.release();
            }
        }
    }

    /// Tells members of a group what the comparison of their digests has found.
    fn compared(&self, group: u64, found: impl IntoIterator<Item = DigestOutcome>) {
        for outcome in found {
            let (ranks, notice) = match outcome {
                DigestOutcome::Equal(ranks, round) => (ranks, Notice::Equal { group, round }),
                DigestOutcome::Show(ranks, round) => (ranks, Notice::Show { group, round }),
            };
            ranks.into_iter().filter_map(|rank| self.seats.get(rank)).for_each(|seat| seat.send(&notice));
        }
    }

    fn give(&self, rank: usize, id: u64, value: Arc<[u8]>) {
        if let Some(link) = &self.seats[rank].link {
            link.outbox.send_with(Notice::Value { id }, value);
        }
    }
}
