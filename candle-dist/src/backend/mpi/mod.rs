//! The backend over an installed MPI: ranks are processes, on one host or many.
//!
//! MPI moves bytes directly between the memory of the ranks' tensors. Every collective consists of messages, as its
//! plan says (`plan.rs`). Reductions use the threads backend's arithmetic in rank order (`reduce.rs`), so results are
//! bit-identical to its results, on all ranks and in every run, for every dtype. A message names its destination and
//! its sender's call (`header.rs`), so groups need no communicators: creating a group costs nothing and cannot block,
//! and their number is not limited. In every collective a rank waits for its neighbor's call, so that a mismatch is
//! found in that call. Waiting threads poll (`driver.rs`) for messages, for a failure of the world and for the
//! deadline, so that no call waits forever.
//!
#![doc = include_str!("README.md")]

mod agree;
mod driver;
mod header;
mod host;
mod keeper;
mod known;
mod mail;
mod native;
mod open;
mod operation;
mod patience;
mod place;
mod plan;
#[cfg(test)]
mod plan_tests;
mod progress;
mod ring;
mod room;
mod shapes;
mod shared;
mod sums;
mod transfer;
mod ways;
mod wire;
mod work;

pub use native::Comm;
pub use sums::Sums;

use super::guards::Guards;
use super::outputs::{completed, deliver, fill, filled, unsupported};
use super::storage::StorageOperand;
use super::{Backend, Call, Form, Op, Results, StartedCall, Tensors};
use crate::control::Control;
use crate::launch::LaunchInfo;
use crate::{Cause, Error, GroupFailure, Result};
use candle_core::{DeviceLocation, Tensor};
use driver::Driver;
use keeper::Keeper;
use known::{CallPlan, CallPlans};
use open::CollectiveId;
use operation::{Circle, HostInput};
use parking_lot::Mutex;
use smallvec::SmallVec;
use std::sync::Arc;
use wire::{MOST_BYTES, TOGETHER};

/// Starts MPI, for the group of all its ranks; ends it when the last group is gone.
///
/// MPI can be started once in a process.
pub fn start(info: &LaunchInfo, control: &Arc<Control>) -> Result<Arc<dyn Backend>> {
    Settings::default().start(info, control)
}

/// The settings of the MPI backend, equal on all ranks: start from the default, and set what differs.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub struct Settings {
    /// The communicator that the backend duplicates, if the program has started MPI itself.
    ///
    /// The program must have requested `MPI_THREAD_MULTIPLE`, and must end MPI only after all groups are gone.
    pub comm: Option<Comm>,
    /// The most bytes of an MPI message, from 2^12 to 2^30, which is the default. Larger tensors are sent in several.
    pub most_bytes: usize,
    /// The most ranks of a host that exchange small messages through shared memory; 16 by default, and 1 for none.
    ///
    /// The ranks of a host form groups of this size, in their order. Each rank of a group of n has n × 64 KiB. If the
    /// program has started MPI itself (`comm`), all messages go through MPI.
    pub most_sharing: usize,
    /// The order of sums and products.
    pub sums: Sums,
}

/// The default of `most_sharing`: a rank looks at the letters of each of these ranks in turn.
const MOST_SHARING: usize = 16;
/// The least value of `most_bytes`: each message costs a request.
const LEAST_BYTES: usize = 1 << 12;

impl Default for Settings {
    fn default() -> Self {
        Self { comm: None, most_bytes: MOST_BYTES, most_sharing: MOST_SHARING, sums: Sums::default() }
    }
}

impl Settings {
    /// Sets the communicator that the backend duplicates.
    pub fn comm(self, comm: impl Into<Option<Comm>>) -> Self {
        Self { comm: comm.into(), ..self }
    }

    /// Sets the most bytes of an MPI message.
    pub fn most_bytes(self, most_bytes: usize) -> Self {
        Self { most_bytes, ..self }
    }

    /// Sets the most ranks of a host that exchange small messages through shared memory.
    pub fn most_sharing(self, most_sharing: usize) -> Self {
        Self { most_sharing, ..self }
    }

    /// Sets the order of sums and products.
    pub fn sums(self, sums: Sums) -> Self {
        Self { sums, ..self }
    }

    /// Like [`start`], for [`init_process_group_with`](crate::init::init_process_group_with).
    ///
    /// # Errors
    /// On all ranks, if MPI does not start on one of them, or has other ranks than the launcher; if the settings of two
    /// ranks differ; if `most_bytes` is out of range.
    pub fn start(self, info: &LaunchInfo, control: &Arc<Control>) -> Result<Arc<dyn Backend>> {
        if !(LEAST_BYTES..=MOST_BYTES).contains(&self.most_bytes) {
            let reason = format!("messages of {} bytes; give {LEAST_BYTES} to {MOST_BYTES}", self.most_bytes);
            return Err(Error::InvalidArgument { rank: control.rank(), op: "mpi::Settings", reason });
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let keeper = Keeper::start(control.clone(), info.local_size > cores, self)?;
        let shared = Arc::new(ProcessState { keeper, sums: self.sums });
        Ok(Arc::new(MpiBackend::join(&shared, (0..control.size()).collect(), control.rank())))
    }

    /// Returns all settings that must be equal on all ranks, as text.
    fn text(&self) -> String {
        let Self { comm, most_bytes, most_sharing, sums } = self;
        let comm = if comm.is_some() { "a communicator" } else { "no communicator" };
        format!("{comm}, most_bytes {most_bytes}, most_sharing {most_sharing}, sums {sums:?}")
    }
}

/// The shared data of the groups of one process.
struct ProcessState {
    keeper: Keeper,
    sums: Sums,
}

/// One rank's handle on a group of processes.
struct MpiBackend {
    shared: Arc<ProcessState>,
    circle: Arc<Circle>,
    turn: Mutex<GroupProgress>,
}

/// The progress of a group's member.
#[derive(Default)]
struct GroupProgress {
    /// The number of its next collective.
    number: u64,
    calls: CallPlans,
}

impl GroupProgress {
    /// Returns the number of a collective that starts now.
    fn next(&mut self) -> u64 {
        self.number += 1;
        self.number - 1
    }
}

impl std::fmt::Debug for MpiBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MpiBackend(rank {} of {:?})", self.circle.me, self.circle.ranks)
    }
}

impl MpiBackend {
    fn join(shared: &Arc<ProcessState>, ranks: Vec<usize>, me: usize) -> Self {
        let member = shared.keeper.driver().control().join(&ranks);
        let circle = Circle { id: member.id(), _member: member, ranks, me };
        Self { shared: shared.clone(), circle: Arc::new(circle), turn: Mutex::default() }
    }

    fn driver(&self) -> &Arc<Driver> {
        self.shared.keeper.driver()
    }

    fn control(&self) -> &Control {
        self.driver().control()
    }

    /// Stops the world because of tensors that are not on the host: other ranks may not know of them.
    fn not_on_host(&self, call: &Call, device: DeviceLocation) -> Error {
        let message =
            format!("{} of tensors on {device:?} over MPI; move them to Device::Cpu first", call.op());
        self.control().fail(Cause::Failed { rank: self.circle.my_rank(), message })
    }

    /// Starts the next collective of this group, and runs `then` for the rest of the call.
    fn enter<R>(&self, call: Call, given: HostInputs, then: impl FnOnce(MpiCall) -> Result<R>) -> Result<R> {
        // Numbers are assigned in the order of calls: a call is started before the next one gets its number.
        let mut turn = self.turn.lock();
        let number = turn.next();
        let on_host = call.device == DeviceLocation::Cpu;
        let given = given.and_then(|given| if on_host { Ok(given) } else { Err(call.device) });
        let known = given.as_ref().ok().and_then(|given| turn.calls.find(&call, given));
        let call = match &known {
            Some(known) if known.call.prints_as(&call) => known.call.clone(),
            _ => Arc::new(call),
        };
        let (circle, driver) = (&self.circle, self.driver());
        let entered = driver.control().enter_shared(circle.id, &circle.ranks, number, &call)?;
        let given = given.map_err(|device| self.not_on_host(&call, device))?;
        let known = match known {
            Some(known) => known,
            None => {
                let made =
                    CallPlan::new(call.clone(), circle.member(), &given, self.shared.sums).map(Arc::new);
                let made = made.map_err(|error| driver.control().fail(circle.failed(error)))?;
                turn.calls.keep(&made);
                made
            }
        };
        let ticket = driver.start(circle, number, known, given)?;
        drop(turn);
        let (driver, circle) = (driver.clone(), circle.clone());
        let made = then(MpiCall { driver, circle, number, call, ticket: Some(ticket) });
        drop(entered);
        made
    }

    /// Sends a message, without waiting.
    fn send(&self, call: &Call, tensors: &[Tensor]) -> Result<()> {
        tensors.iter().try_for_each(|tensor| match tensor.device().location() {
            DeviceLocation::Cpu => self.driver().send(&self.circle, call, tensor),
            device => Err(self.not_on_host(call, device)),
        })
    }

    /// Runs a barrier that names the ranks that do not come.
    fn monitor(&self, call: &Call) -> Result<()> {
        // Held until the end, so that threads enter rounds in the order of their numbers.
        let mut turn = self.turn.lock();
        let number = turn.next();
        let (control, circle) = (self.control(), &self.circle);
        control.enter_monitored(circle.id, &circle.ranks, number, call).map(drop)
    }
}

/// The inputs of a collective, or their device if it is not the host.
type HostInputs = std::result::Result<SmallVec<[HostInput; 1]>, DeviceLocation>;

/// Returns the tensors, which nobody can write to until the collective no longer reads them.
fn held(tensors: &[Tensor]) -> Result<HostInputs> {
    let devices = tensors.iter().map(|tensor| tensor.device().location());
    if let Some(device) = devices.into_iter().find(|&device| device != DeviceLocation::Cpu) {
        return Ok(Err(device));
    }
    let guards =
        Guards::new(&tensors.iter().map(StorageOperand::of).collect::<SmallVec<[StorageOperand<'_>; 4]>>());
    // SAFETY: the locks are those of the tensors, in their order.
    let given =
        tensors.iter().zip(guards.iter()).map(|(tensor, guard)| unsafe { HostInput::new(tensor, guard) });
    Ok(Ok(given.collect::<Result<_>>()?))
}

/// A collective that this member has started and not finished.
struct MpiCall {
    driver: Arc<Driver>,
    circle: Arc<Circle>,
    number: u64,
    call: Arc<Call>,
    /// `None` when it is finished.
    ticket: Option<CollectiveId>,
}

impl MpiCall {
    fn results(mut self) -> Result<Results> {
        self.ticket.take().map_or_else(|| Ok(Results::new()), |ticket| self.driver.finish(ticket))
    }
}

impl StartedCall for MpiCall {
    fn is_ready(&self) -> Result<bool> {
        self.ticket.map_or(Ok(true), |ticket| self.driver.is_ready(ticket))
    }

    fn finish(self: Box<Self>) -> Result<Results> {
        let driver = self.driver.clone();
        let circle = self.circle.clone();
        let _entered = driver.control().enter_shared(circle.id, &circle.ranks, self.number, &self.call)?;
        self.results()
    }
}

impl Drop for MpiCall {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.driver.give_up(ticket);
        }
    }
}

impl Drop for MpiBackend {
    fn drop(&mut self) {
        self.driver().forget(&self.circle);
    }
}

impl Backend for MpiBackend {
    fn name(&self) -> &'static str {
        "mpi"
    }

    fn rank(&self) -> usize {
        self.circle.me
    }

    fn ranks(&self) -> &[usize] {
        &self.circle.ranks
    }

    fn run(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Results> {
        match call.form {
            _ if call.op() == Op::Send => self.send(&call, &tensors).map(|()| Results::new()),
            Form::Monitored => self.monitor(&call).map(|()| Results::new()),
            _ => fill(&outputs, self.enter(call, held(&tensors)?, MpiCall::results)?),
        }
    }

    fn start(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Box<dyn StartedCall>> {
        if call.op() == Op::Send {
            return self.send(&call, &tensors).map(|()| completed(Results::new()));
        }
        self.driver().wait_for_room()?;
        let started =
            self.enter(call, held(&tensors)?, |started| Ok(Box::new(started) as Box<dyn StartedCall>))?;
        Ok(filled(started, outputs))
    }

    fn recv(&self, call: Call, output: Option<&Tensor>) -> Result<(usize, Tensor)> {
        let Some(from) = call.collective.peer() else {
            return Err(unsupported(self.name(), "receive from any rank"));
        };
        deliver(from, self.driver().receive(&self.circle, &call, from)?, output)
    }

    fn copies_sent(&self, bytes: usize) -> bool {
        bytes <= TOGETHER
    }

    fn finish(&self) -> Result<()> {
        // This rank's results do not depend on what others still do.
        self.shared.keeper.wind_up();
        Ok(())
    }

    fn stop(&self, cause: Cause) {
        self.control().fail(cause);
    }

    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Backend>> {
        let ranks: Vec<usize> = members.iter().map(|&member| self.circle.ranks[member]).collect();
        let rank = self.circle.my_rank();
        let me = ranks.iter().position(|&member| member == rank).ok_or_else(|| Error::InvalidArgument {
            rank,
            op: "subgroup",
            reason: format!("only members create a group, and this rank is not in {ranks:?}"),
        })?;
        self.driver().check()?;
        Ok(Arc::new(Self::join(&self.shared, ranks, me)))
    }

    fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.control().failure()
    }
}
