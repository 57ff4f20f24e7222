//! What the processes of a world know of each other: who failed, and what everybody waits in.
//!
//! Every process keeps a connection to rank 0, over which it says when it ends and why, and hears of failures. This is
//! what an engine between processes leans on; it moves the tensors itself.
mod activity;
mod departed;
mod dial;
mod hub;
mod ids;
mod limits;
mod message;
mod rounds;
mod server;
mod signature;
mod watch;

pub use ids::{channel, group_id};

use crate::call::Call;
use crate::error::End;
use crate::launch::{InitOptions, LaunchInfo};
use crate::link::Link;
use crate::link::frame::{MAX_KEY, MAX_VALUE};
use crate::values::{Change, Outcome};
use crate::{Cause, Error, GroupFailure, Result};
use activity::Meeting;
use message::Request;
use parking_lot::Mutex;
use server::Server;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;
use watch::{How, Watch};

/// How long a process that ends waits for the others to hear of a failure.
const FAREWELL: Duration = Duration::from_secs(2);

/// What a process knows of its world; an engine polls it while it waits, and tells it what its rank is in.
///
/// A rank that fails, panics, ends while others wait for it, dies, or waits longer than the timeout stops the world:
/// every rank gets the same [`GroupFailure`], with what each rank was doing. Dropping it says goodbye.
pub struct Control {
    rank: usize,
    size: usize,
    timeout: Duration,
    debug: bool,
    watch: Arc<Watch>,
    /// Until the goodbye; rank 0 has the server too.
    ties: Mutex<Option<(Link<Request>, Option<Server>)>>,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Control({} of {})", self.rank, self.size)
    }
}

/// A rank is in a call until this is dropped.
#[derive(Debug)]
pub struct Entered<'a> {
    watch: &'a Watch,
    doing: u64,
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        self.watch.leave(self.doing);
    }
}

/// A rank's membership of a group; what is known of the group's rounds and messages goes when this is dropped.
///
/// Rank 0 then remembers how far this member came until the others have dropped theirs, so that those who still wait
/// know whether this member has taken part.
#[derive(Debug)]
pub struct Membership {
    watch: Arc<Watch>,
    id: u64,
    size: usize,
}

impl Membership {
    /// Names the group, alike on all members.
    pub fn id(&self) -> u64 {
        self.id
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.watch.forget(self.id, self.size);
    }
}

impl Control {
    /// Meets the other processes: returns when all are there, or with the same error on all that came.
    ///
    /// Rank 0 listens at the address, on that interface alone. Connections that are not of this job are dropped or
    /// refused: the token tells jobs apart, but neither it nor anything else is encrypted.
    pub fn connect(info: &LaunchInfo, options: &InitOptions) -> Result<Arc<Self>> {
        let server = if info.rank == 0 { Some(Server::start(info, options)?) } else { None };
        let stream = dial::dial(info, server.as_ref().map(Server::address), options.init_timeout)?;
        let watch = Arc::new(Watch::new(info.rank, info.world_size));
        let listening = watch.clone();
        let link = Link::start(stream, options.lost_after, move |event| listening.on(event))
            .map_err(|error| Error::Init(format!("rank {} cannot start its threads: {error}", info.rank)))?;
        watch.speak_through(link.outbox.clone());
        let met = watch.meet();
        let control = Self {
            rank: info.rank,
            size: info.world_size,
            timeout: options.timeout,
            debug: *met.as_ref().unwrap_or(&false),
            watch,
            ties: Mutex::new(Some((link, server))),
        };
        // Also where they did not meet, this process leaves as it would later.
        met.map(|_| Arc::new(control))
    }

    /// This process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// The number of processes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// How long a rank may wait in one call.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// The failure that stopped the world, if one did; costs an atomic load.
    pub fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.watch.failure().cloned()
    }

    /// Stops the world; the first cause counts. The error is the same value on all ranks, with every rank's report.
    pub fn fail(&self, cause: Cause) -> Error {
        self.watch.fail(cause)
    }

    /// Makes this rank a member of a group of these ranks of the world, in the order in which the group counts them.
    ///
    /// Sends nothing. Members that make several groups of the same list make them in the same order.
    pub fn join(&self, ranks: &[usize]) -> Membership {
        Membership { watch: self.watch.clone(), id: self.watch.join(ranks), size: ranks.len() }
    }

    /// The [`channel`] of the next message from rank `from` of the world to rank `to` on a group, and its number there.
    ///
    /// Both sides ask once for each message, and [`enter`](Self::enter) with the answer as group and round. The counts
    /// of a group go when its [`Membership`] is dropped; 256 tags of a pair of ranks have counts of their own and others
    /// share them, so memory has a bound for any number of tags.
    pub fn message(&self, group: u64, from: usize, to: usize, tag: u32) -> (u64, u64) {
        self.watch.message(group, from, to, tag)
    }

    /// Notes that this rank is in its call number `round` on `group`, until the guard is dropped.
    ///
    /// `ranks` are the members, as ranks of the world; rounds of a group are counted from 0, alike on all members. A
    /// second `enter` of a round is a return to a call that was started before. Messages are no rounds of their group:
    /// send and recv give what [`message`](Self::message) answers, and sender and receiver as `ranks`.
    ///
    /// Fails if the world has failed, or if a member has ended without ever entering this round. In debug mode it
    /// waits until all members have entered (unless `call` is a send, or is only being started), and compares their
    /// calls.
    pub fn enter(&self, group: u64, ranks: &[usize], round: u64, call: &Call) -> Result<Entered<'_>> {
        let how = if self.debug { How::Compared } else { How::Noted };
        let doing = self.watch.enter(Meeting::new(group, ranks, round), call, how, self.timeout)?;
        Ok(Entered { watch: &self.watch, doing })
    }

    /// Like [`enter`](Self::enter), and waits until all members have entered, at most for `limit`.
    ///
    /// A round is entered in this way by all members or by none.
    ///
    /// # Errors
    /// Stops the world with [`Cause::Missing`], which names every member that has not come.
    pub fn enter_monitored(
        &self,
        group: u64,
        ranks: &[usize],
        round: u64,
        call: &Call,
        limit: Duration,
    ) -> Result<Entered<'_>> {
        let doing = self.watch.enter(Meeting::new(group, ranks, round), call, How::Monitored, limit)?;
        Ok(Entered { watch: &self.watch, doing })
    }

    /// Gives all ranks the `value` of `key`; at most 16 MiB, under a name of at most 4 KiB.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_sizes(self.rank, key, value.len())?;
        self.watch.set(key, value)
    }

    /// The value of `key`; waits until a rank sets it, or the world fails, which the timeout makes it do.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        check_sizes(self.rank, key, 0)?;
        self.watch.get(key, self.timeout)
    }

    /// The value of `key`, or `None` if no rank sets it within `limit`.
    pub fn get_within(&self, key: &str, limit: Duration) -> Result<Option<Vec<u8>>> {
        check_sizes(self.rank, key, 0)?;
        self.watch.get_within(key, limit, self.timeout)
    }

    /// Changes a value at rank 0, as one step.
    pub(crate) fn change(&self, key: &str, change: &Change, bytes: &[u8]) -> Result<(Outcome, Vec<u8>)> {
        self.watch.change(key, change, bytes, self.timeout)
    }

    /// Says goodbye: how this rank ended. Returns when the others have heard what they must, at most seconds after a
    /// failure; without one, rank 0 stays until all have ended, however long they compute alone.
    pub(crate) fn leave(&self, end: End) {
        let Some((link, server)) = self.ties.lock().take() else { return };
        self.watch.part(end, FAREWELL);
        link.finish();
        if let Some(server) = server {
            server.finish(FAREWELL);
        }
    }
}

impl Drop for Control {
    fn drop(&mut self) {
        self.leave(End::of_thread());
    }
}

/// Refuses keys and values that are too long to be passed on.
pub(crate) fn check_sizes(rank: usize, key: &str, value: usize) -> Result<()> {
    for (what, len, limit) in [("key", key.len(), MAX_KEY), ("value", value, MAX_VALUE)] {
        if len > limit {
            let reason = format!("a {what} of {len} bytes; at most {limit} are passed on, so send tensors instead");
            return Err(Error::InvalidArgument { rank, op: "store", reason });
        }
    }
    Ok(())
}
