//! Control messages between the processes of a world: failures, and the calls that ranks wait in.
//!
//! Every process keeps a connection to rank 0. It reports its end and the reason there, and it learns of failures.
//! Backends between processes rely on it; they move the tensors themselves.
//!
#![doc = include_str!("README.md")]

mod activity;
mod arguments;
mod decide;
mod departed;
mod dial;
mod digests;
mod hub;
mod ids;
mod limits;
mod message;
mod rounds;
mod server;
mod signature;
mod terms;
mod watch;

#[cfg(feature = "mpi")]
pub(crate) use decide::LAG;
pub use ids::{channel, group_id};

use crate::call::Call;
#[cfg(feature = "nccl")]
use crate::call::{Form, Op};
use crate::error::End;
#[cfg(feature = "nccl")]
use crate::launch::GpuOptions;
use crate::launch::{InitOptions, LaunchInfo};
use crate::link::frame::{self, MAX_KEY, MAX_VALUE};
use crate::link::{DeadlineStream, Link, within};
use crate::switch::{Switch, Switches};
use crate::values::{ChangeOutcome, ValueChange};
use crate::{Cause, Error, GroupFailure, Result};
use activity::Meeting;
#[cfg(feature = "nccl")]
use candle_core::DeviceLocation;
use message::{CauseRecord, HubRequest};
use parking_lot::Mutex;
use server::ControlServer;
use std::fmt;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Shutdown, TcpStream};
use std::sync::Arc;
use std::time::Duration;
use watch::{EntryMode, VERDICT, Watch};

/// How long a process that ends waits until the others have been told of a failure.
const FAREWELL: Duration = Duration::from_secs(2);

/// The control connection of a process. A backend polls it while it waits, and reports the calls of its rank to it.
///
/// The world stops if a rank fails, panics, ends while others wait for it, dies, or waits longer than the timeout.
/// Every rank then gets the same [`GroupFailure`] with a report of each rank. Dropping the connection ends the rank.
pub struct Control {
    rank: usize,
    size: usize,
    timeout: Duration,
    start_timeout: Duration,
    init_timeout: Duration,
    /// The addresses of this process and of rank 0.
    ends: [IpAddr; 2],
    switches: Switches,
    #[cfg(feature = "nccl")]
    gpu: GpuOptions,
    watch: Arc<Watch>,
    /// `None` after the goodbye. Rank 0 also has the server.
    ties: Mutex<Option<(Link<HubRequest>, Option<ControlServer>)>>,
}

impl fmt::Debug for Control {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Control({} of {})", self.rank, self.size)
    }
}

/// A guard: the rank is in a call until this is dropped.
#[derive(Debug)]
pub struct WatchGuard<'a> {
    watch: &'a Watch,
    doing: u64,
}

impl Drop for WatchGuard<'_> {
    fn drop(&mut self) {
        self.watch.leave(self.doing);
    }
}

/// The membership of this rank in a group. Dropping it forgets the group's rounds and messages.
///
/// Rank 0 remembers this member's rounds until the other members have dropped theirs. Members that still wait can thus
/// find out whether this member has taken part.
#[derive(Debug)]
pub struct Membership {
    watch: Arc<Watch>,
    id: u64,
    size: usize,
}

impl Membership {
    /// Returns the id of the group, equal on all members.
    pub fn id(&self) -> u64 {
        self.id
    }
}

impl Drop for Membership {
    fn drop(&mut self) {
        self.watch.forget(self.id, &[], self.size);
    }
}

impl Control {
    /// Connects to the other processes. Returns when all have joined, or with the same error on all that joined.
    ///
    /// Rank 0 listens at the address. Processes join if they prove that they know the secret of
    /// the job; other connections are dropped. Nothing is encrypted.
    pub fn connect(info: &LaunchInfo, options: &InitOptions) -> Result<Arc<Self>> {
        let server = match info.rank {
            0 => Some(ControlServer::start(info, options)?),
            _ => None,
        };
        let (stream, terms) =
            dial::dial(info, server.as_ref().map(ControlServer::own), options.init_timeout)?;
        let ends = [stream.local_addr(), stream.peer_addr()]
            .map(|end| end.map_or(Ipv4Addr::UNSPECIFIED.into(), |end| end.ip()));
        let watch = Arc::new(Watch::new(info.rank, info.world_size));
        let listening = watch.clone();
        let bare = stream.try_clone();
        let link = Link::start(stream, terms.lost_after, Vec::new(), move |event| listening.on(event));
        let link = link.map_err(|error| without_threads(info.rank, bare, &error))?;
        watch.speak_through(link.outbox.clone());
        watch.present(arguments::own(options).as_deref().map(arguments::digests));
        let met = watch.meet(options.init_timeout.saturating_add(VERDICT));
        let control = Self {
            rank: info.rank,
            size: info.world_size,
            timeout: options.timeout,
            start_timeout: options.timeout.max(options.init_timeout),
            init_timeout: options.init_timeout,
            ends,
            switches: terms.switches,
            #[cfg(feature = "nccl")]
            gpu: options.gpu,
            watch,
            ties: Mutex::new(Some((link, server))),
        };
        if let Err(error) = met {
            control.leave(End::Failed(error.to_string()));
            return Err(error);
        }
        Ok(Arc::new(control))
    }

    /// Returns this process's rank.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Returns the number of processes.
    pub fn size(&self) -> usize {
        self.size
    }

    /// Returns how long a rank may wait in one call.
    pub fn timeout(&self) -> Duration {
        self.timeout
    }

    /// Returns how long the processes may take to connect, and how long a backend may take to do so.
    pub fn init_timeout(&self) -> Duration {
        self.init_timeout
    }

    /// Returns the switches of rank 0, which hold for all ranks.
    pub(crate) fn switches(&self) -> Switches {
        self.switches
    }

    /// Returns what this process sets for its GPU.
    #[cfg(feature = "nccl")]
    pub(crate) fn gpu(&self) -> GpuOptions {
        self.gpu
    }

    /// Returns the ends of the connection to rank 0: the addresses of this process and of rank 0 that reach each other.
    pub fn ends(&self) -> [IpAddr; 2] {
        self.ends
    }

    /// Records that this rank is in a stage of its backend's start, until the guard is dropped. Reports name it.
    pub fn stage(&self, name: &str) -> WatchGuard<'_> {
        WatchGuard { watch: &self.watch, doing: self.watch.begin(name) }
    }

    /// Returns how long a rank may wait for other ranks at each point of its backend's start.
    pub fn start_timeout(&self) -> Duration {
        self.start_timeout
    }

    /// Returns the failure that stopped the world, if any; costs one atomic load.
    pub fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.watch.failure().cloned()
    }

    /// Stops the world, unless it has stopped. All ranks get the same error, with the reports of all ranks.
    pub fn fail(&self, cause: Cause) -> Error {
        self.watch.fail(cause)
    }

    /// Makes this rank a member of a group. `ranks` are its members as ranks of the world, in group order.
    ///
    /// Sends nothing. If members create several groups from the same list, they must create them in the same order.
    pub fn join(&self, ranks: &[usize]) -> Membership {
        Membership { watch: self.watch.clone(), id: self.watch.join(ranks), size: ranks.len() }
    }

    /// Returns the [`channel`] and the number of the next message on a group, between two ranks of the world.
    ///
    /// Both sides call it once per message, and pass the result to [`enter`](Self::enter) as group and round. Dropping
    /// the [`Membership`] of a group frees its counts. For each pair of ranks, 256 tags have their own counts and other
    /// tags share them, so memory is bounded for any number of tags.
    pub fn message(&self, group: u64, from: usize, to: usize, tag: u32) -> (u64, u64) {
        self.watch.message(group, from, to, tag)
    }

    /// Records that this rank is in its call number `round` on `group`, until the guard is dropped.
    ///
    /// `ranks` are the members, as ranks of the world. Rounds of a group count from 0, equally on all members. A second
    /// `enter` of a round returns to a call that was started before. Messages are not rounds of their group: send and
    /// recv pass the result of [`message`](Self::message), and sender and receiver as `ranks`.
    ///
    /// Fails if the world has failed, or if a member has ended without entering this round. In debug mode, it waits
    /// until all members have entered and compares their calls; a send or a started call does not wait.
    pub fn enter(&self, group: u64, ranks: &[usize], round: u64, call: &Call) -> Result<WatchGuard<'_>> {
        self.enter_shared(group, ranks, round, &Arc::new(call.clone()))
    }

    /// Like [`enter`](Self::enter), without a copy of the call.
    pub(crate) fn enter_shared(
        &self,
        group: u64,
        ranks: &[usize],
        round: u64,
        call: &Arc<Call>,
    ) -> Result<WatchGuard<'_>> {
        let how = if self.switches.has(Switch::Debug) { EntryMode::Compared } else { EntryMode::Noted };
        let doing = self.watch.enter(Meeting::new(group, ranks, round), call, how, self.timeout)?;
        Ok(WatchGuard { watch: &self.watch, doing })
    }

    /// Like [`enter_shared`](Self::enter_shared), and always compares the call with those of the other members. Without
    /// debug mode, only collectives on the host and barriers wait for this, because their results are waited for anyway.
    /// Others stop the world later if they differ: [`agree`](Self::agree) waits for that. Of these collectives, rank 0 gets
    /// digests, many in one message; [`tell_calls`](Self::tell_calls) sends those of the last moments.
    #[cfg(feature = "nccl")]
    pub(crate) fn enter_compared(
        &self,
        group: u64,
        ranks: &[usize],
        round: u64,
        call: &Arc<Call>,
    ) -> Result<WatchGuard<'_>> {
        let is_message = call.collective.is_message();
        let on_host = call.op() == Op::Barrier || call.device == DeviceLocation::Cpu;
        // A started call is entered once, so nothing waits for it but the end of the rank.
        let waits =
            call.form != Form::Started && (self.switches.has(Switch::Debug) || on_host && !is_message);
        let how = if waits { EntryMode::Compared } else { EntryMode::ComparedLater };
        let doing = self.watch.enter(Meeting::new(group, ranks, round), call, how, self.timeout)?;
        Ok(WatchGuard { watch: &self.watch, doing })
    }

    /// Tells rank 0 of the calls that it has not been told of. To be called a few times in each second.
    #[cfg(feature = "nccl")]
    pub(crate) fn tell_calls(&self) {
        self.watch.tell_calls();
    }

    /// Tells rank `peer`, at the other end of a channel, that this rank has enqueued its part of the message `number`.
    #[cfg(feature = "nccl")]
    pub(crate) fn post(&self, peer: usize, channel: u64, number: u64, sends: bool) {
        self.watch.post(peer, channel, number, sends);
    }

    /// Returns whether the other end of a channel, which sends or receives, has enqueued its part of the message `number`. Waits for at
    /// most `limit`.
    #[cfg(feature = "nccl")]
    pub(crate) fn is_posted(&self, channel: u64, number: u64, sends: bool, limit: Duration) -> bool {
        self.watch.is_posted(channel, number, sends, limit)
    }

    /// Forgets a channel of which this rank was an end.
    #[cfg(feature = "nccl")]
    pub(crate) fn forget_posts(&self, channel: u64) {
        self.watch.forget_posts(channel);
    }

    /// Forgets a group of `members` ranks, and `channels`, whose messages the backend has numbered.
    #[cfg(feature = "nccl")]
    pub(crate) fn forget(&self, group: u64, channels: &[u64], members: usize) {
        self.watch.forget(group, channels, members);
    }

    /// Waits until all calls that are compared later are known to be equal, for at most the timeout of the world.
    pub(crate) fn agree(&self) -> Result<()> {
        self.watch.agree(self.timeout)
    }

    /// Returns whether a rank has ended.
    #[cfg(feature = "nccl")]
    pub(crate) fn has_anyone_left(&self) -> bool {
        self.watch.has_anyone_left()
    }

    /// Returns whether a rank has ended without entering this round of a group or channel.
    #[cfg(any(feature = "mpi", feature = "nccl"))]
    pub(crate) fn has_left(&self, rank: usize, group: u64, round: u64) -> bool {
        self.watch.has_left(rank, group, round)
    }

    /// Like [`enter`](Self::enter), but waits until all members have entered, for at most `limit`.
    ///
    /// Either all members enter a round this way, or none.
    ///
    /// # Errors
    /// Stops the world with [`Cause::Missing`], which names every member that did not arrive.
    pub fn enter_monitored(
        &self,
        group: u64,
        ranks: &[usize],
        round: u64,
        call: &Call,
    ) -> Result<WatchGuard<'_>> {
        let (call, limit) = (Arc::new(call.clone()), call.timeout.unwrap_or(self.timeout));
        let doing =
            self.watch.enter(Meeting::new(group, ranks, round), &call, EntryMode::Monitored, limit)?;
        Ok(WatchGuard { watch: &self.watch, doing })
    }

    /// Sets the value of `key` for all ranks, and waits until rank 0 has stored it. Values have at most 16 MiB, keys at most 4 KiB.
    ///
    /// # Errors
    /// If all values together would have more than 1 GiB. The world goes on.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_sizes(self.rank, key, value.len())?;
        // Backends set values while they start, where the timeout of a call does not count yet.
        match self.watch.change(key, &ValueChange::Set, value, self.start_timeout)? {
            (ChangeOutcome::Refused(reason), _) => {
                Err(Error::InvalidArgument { rank: self.rank, op: "store", reason })
            }
            _ => Ok(()),
        }
    }

    /// Returns the value of `key`. Waits until a rank sets it; after the timeout, the world fails.
    pub fn get(&self, key: &str) -> Result<Vec<u8>> {
        check_sizes(self.rank, key, 0)?;
        self.watch.get(key, self.timeout)
    }

    /// Returns the value of `key`, or `None` if no rank sets it within `limit`.
    pub fn get_within(&self, key: &str, limit: Duration) -> Result<Option<Vec<u8>>> {
        check_sizes(self.rank, key, 0)?;
        self.watch.get_within(key, limit, self.timeout)
    }

    /// Returns the value of `key`, if a rank has set it. The timeout of a call does not count.
    pub(crate) fn peek_at_start(&self, key: &str) -> Result<Option<Vec<u8>>> {
        check_sizes(self.rank, key, 0)?;
        self.watch.get_within(key, Duration::ZERO, self.start_timeout)
    }

    /// Changes a value at rank 0 atomically.
    pub(crate) fn change(
        &self,
        key: &str,
        change: &ValueChange,
        bytes: &[u8],
    ) -> Result<(ChangeOutcome, Vec<u8>)> {
        self.watch.change(key, change, bytes, self.timeout)
    }

    /// Says goodbye and reports how this rank ended. Until [`leave`](Self::leave), this process still hears of the others.
    pub(crate) fn announce(&self, end: End) {
        self.watch.announce(end);
    }

    /// Waits after the goodbye until all ranks have ended, so that the result of this rank depends on them too.
    ///
    /// # Errors
    /// If the world stops meanwhile, unless the cause is that this rank has returned.
    pub(crate) fn outlast(&self) -> Result<()> {
        self.watch.outlast()
    }

    /// Says goodbye unless that is done, reports how this rank ended, and ends the connection.
    ///
    /// After a failure, it returns within seconds. Without one, rank 0 stays until all ranks have ended, however long they
    /// compute alone.
    pub(crate) fn leave(&self, end: End) {
        let Some((link, server)) = self.ties.lock().take() else { return };
        self.watch.announce(end);
        self.watch.part(FAREWELL);
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

/// Tells rank 0, and so all ranks, that a rank which was let in cannot start its threads.
fn without_threads(rank: usize, stream: io::Result<TcpStream>, error: &io::Error) -> Error {
    let why = format!(
        "rank {rank} cannot start its threads: {error}; raise the limit on threads (ulimit -u, pids.max of the cgroup) or on memory"
    );
    if let Ok(stream) = stream {
        let mut stream = DeadlineStream { stream: &stream, deadline: within(FAREWELL) };
        let told = frame::write(
            &mut stream,
            &HubRequest::Fail(CauseRecord::Failed { rank, message: why.clone() }),
            &[],
        );
        // Closing with unread bytes would reset the connection, before rank 0 has read this.
        let _ = told.and_then(|()| stream.stream.shutdown(Shutdown::Write));
        let _ = io::copy(&mut stream, &mut io::sink());
    }
    Error::Init(why)
}

/// Refuses keys and values that are too long to send.
pub(crate) fn check_sizes(rank: usize, key: &str, value: usize) -> Result<()> {
    for (what, len, limit) in [("key", key.len(), MAX_KEY), ("value", value, MAX_VALUE)] {
        if len > limit {
            let reason =
                format!("a {what} of {len} bytes; at most {limit} are passed on, so send tensors instead");
            return Err(Error::InvalidArgument { rank, op: "store", reason });
        }
    }
    Ok(())
}
