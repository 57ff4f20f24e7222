//! The engine over an MPI that is there already: ranks are processes, on one host or many.
//!
//! MPI only moves bytes. Every collective is made of messages (`stage.rs`), reductions are made by the arithmetic of
//! the local engine in rank order (`reduce.rs`), so results are bit-identical to its, on all ranks and from run to run,
//! for every dtype. A message says where it belongs (`header.rs`), so groups need no communicator: making one costs
//! nothing, there may be any number, and none of it can block. Whoever waits polls (`engine.rs`) for what has come, for
//! a failure of the world and for the deadline, so that no call waits for ever.
mod engine;
mod header;
mod keeper;
mod mail;
mod operation;
mod patience;
mod request;
mod spare;
mod stage;
mod wire;

use super::{Backend, Call, Results, Tensors, Unfinished, overwrite};
use crate::control::Control;
use crate::init::LaunchInfo;
use crate::{Cause, Error, GroupFailure, Result};
use candle_core::{DeviceLocation, Tensor};
use engine::{Engine, Ticket};
use ferrompi::Communicator;
use keeper::Keeper;
use operation::Circle;
use parking_lot::Mutex;
use smallvec::smallvec;
use std::sync::Arc;
use std::time::Duration;
use wire::MOST_BYTES;

/// Starts MPI, for the group of all its ranks; ends it when the last group is gone.
///
/// MPI can be started once in a process.
pub fn start(info: &LaunchInfo, control: &Arc<Control>) -> Result<Arc<dyn Backend>> {
    Settings::default().start(info, control)
}

/// What a program wants otherwise than it is by default; alike on all ranks.
#[derive(Clone, Copy)]
pub struct Settings<'a> {
    /// Of a program that has started MPI itself, with this binding: the communicator that the engine takes a copy of.
    ///
    /// The program must have asked for `ThreadLevel::Multiple`, and end MPI only when all groups are gone.
    pub comm: Option<&'a Communicator>,
    /// The most bytes of a message of MPI's, from 2^12 to 2^30, which is the default; larger tensors go in several. The same
    /// on all ranks.
    pub most_bytes: usize,
}

/// The fewest bytes that messages may be limited to: each costs a request.
const LEAST_BYTES: usize = 1 << 12;

impl Default for Settings<'_> {
    fn default() -> Self {
        Self { comm: None, most_bytes: MOST_BYTES }
    }
}

impl Settings<'_> {
    /// Like [`start`], for [`init_process_group_with`](crate::init::init_process_group_with).
    ///
    /// # Errors
    /// If MPI does not start, or knows of other ranks than the launcher; if messages are to be larger or smaller than they
    /// can be.
    pub fn start(self, info: &LaunchInfo, control: &Arc<Control>) -> Result<Arc<dyn Backend>> {
        if !(LEAST_BYTES..=MOST_BYTES).contains(&self.most_bytes) {
            let reason = format!("messages of {} bytes; give {LEAST_BYTES} to {MOST_BYTES}", self.most_bytes);
            return Err(Error::InvalidArgument { rank: control.rank(), op: "mpi::Settings", reason });
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let keeper = Keeper::start(control.clone(), info.local_size > cores, self)?;
        let shared = Arc::new(Shared { keeper });
        Ok(Arc::new(MpiBackend::join(&shared, (0..control.size()).collect(), control.rank())))
    }
}

/// What the groups of one process have in common.
struct Shared {
    keeper: Keeper,
}

/// One rank's handle on a group of processes.
struct MpiBackend {
    shared: Arc<Shared>,
    circle: Arc<Circle>,
    /// The number of collectives started.
    turn: Mutex<u64>,
}

impl std::fmt::Debug for MpiBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "MpiBackend(rank {} of {:?})", self.circle.me, self.circle.ranks)
    }
}

impl MpiBackend {
    fn join(shared: &Arc<Shared>, ranks: Vec<usize>, me: usize) -> Self {
        let member = shared.keeper.engine().control().join(&ranks);
        let circle = Circle { id: member.id(), _member: member, ranks, me };
        Self { shared: shared.clone(), circle: Arc::new(circle), turn: Mutex::default() }
    }

    fn engine(&self) -> &Arc<Engine> {
        self.shared.keeper.engine()
    }

    fn control(&self) -> &Control {
        self.engine().control()
    }

    /// Stops the world over tensors that are not on the host: other ranks may have none that tells them.
    fn check_host(&self, call: &Call, tensors: &[Tensor]) -> Result<()> {
        let mut devices = tensors.iter().map(|tensor| tensor.device().location()).chain([call.device]);
        let Some(device) = devices.find(|&device| device != DeviceLocation::Cpu) else { return Ok(()) };
        self.fail(&format!("{} of tensors on {device:?} over MPI; move them to Device::Cpu first", call.op));
        self.engine().check()
    }

    /// Starts the next collective of this group, and `then` does what is left of the call.
    fn enter<R>(&self, call: Call, tensors: Tensors, then: impl FnOnce(Started) -> Result<R>) -> Result<R> {
        // Numbers are given in the order of calls, and the call is made before the next one gets its number.
        let mut turn = self.turn.lock();
        let number = *turn;
        *turn += 1;
        let entered = self.control().enter(self.circle.id, &self.circle.ranks, number, &call)?;
        self.check_host(&call, &tensors)?;
        let ticket = self.engine().start(&self.circle, number, call.clone(), tensors)?;
        drop(turn);
        let engine = self.engine().clone();
        let made = then(Started { engine, circle: self.circle.clone(), number, call, ticket: Some(ticket) });
        drop(entered);
        made
    }
}

/// A collective that this member has started and not finished.
struct Started {
    engine: Arc<Engine>,
    circle: Arc<Circle>,
    number: u64,
    call: Call,
    /// `None` once it is finished.
    ticket: Option<Ticket>,
}

impl Started {
    fn results(mut self) -> Result<Results> {
        self.ticket.take().map_or_else(|| Ok(Results::new()), |ticket| self.engine.finish(ticket))
    }
}

impl Unfinished for Started {
    fn is_ready(&self) -> Result<bool> {
        self.ticket.map_or(Ok(true), |ticket| self.engine.is_ready(ticket))
    }

    fn finish(self: Box<Self>) -> Result<Results> {
        let engine = self.engine.clone();
        let circle = self.circle.clone();
        let _entered = engine.control().enter(circle.id, &circle.ranks, self.number, &self.call)?;
        self.results()
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        if let Some(ticket) = self.ticket.take() {
            self.engine.give_up(ticket);
        }
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

    fn run(&self, call: Call, tensors: Tensors) -> Result<Results> {
        self.enter(call, tensors, Started::results)
    }

    fn run_in_place(&self, call: Call, tensor: &Tensor) -> Result<()> {
        let made = self.run(call, smallvec![tensor.clone()])?;
        made.into_iter().try_for_each(|made| overwrite::overwrite(tensor, &[&made.into_tensor()]))
    }

    fn start(&self, call: Call, tensors: Tensors) -> Result<Box<dyn Unfinished>> {
        self.enter(call, tensors, |started| Ok(Box::new(started) as Box<dyn Unfinished>))
    }

    fn send(&self, call: Call, tensor: Tensor) -> Result<()> {
        self.check_host(&call, std::slice::from_ref(&tensor))?;
        self.engine().send(&self.circle, &call, &tensor)
    }

    fn recv(&self, call: Call) -> Result<Tensor> {
        self.engine().receive(&self.circle, &call)
    }

    fn monitored_barrier(&self, call: &Call, timeout: Duration) -> Option<Result<()>> {
        let number = {
            let mut turn = self.turn.lock();
            *turn += 1;
            *turn - 1
        };
        let (control, circle) = (self.control(), &self.circle);
        Some(control.enter_monitored(circle.id, &circle.ranks, number, call, timeout).map(drop))
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
        self.engine().check()?;
        Ok(Arc::new(Self::join(&self.shared, ranks, me)))
    }

    fn fail(&self, message: &str) {
        self.control().fail(Cause::Failed { rank: self.circle.my_rank(), message: message.to_string() });
    }

    fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.control().failure()
    }
}
