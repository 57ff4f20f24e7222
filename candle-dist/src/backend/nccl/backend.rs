//! NCCL as a backend of process groups.
use super::comm::{CommMembers, NcclComm};
use super::devices;
use super::errors::check_version;
use super::handle::library_version;
use super::lane::{LaneSender, open_receiver};
use super::launches::{CallLaunch, LaterLaunch};
use super::limit::PriorWork;
use super::marks;
use super::rank::{NcclRank, PendingCall, RankTerms};
use super::transfer::{self, TensorTransfer, exchanges, issue, issue_in_place, issue_receive};
use super::watch::{WorldGuard, WorldWatch};
use crate::backend::cuda::driver;
use crate::backend::outputs::{completed, deliver, fill, filled, unsupported};
use crate::backend::{Backend, Call, Collective, Cut, Form, Fresh, Op, Results, StartedCall, Tensors};
use crate::control::channel;
use crate::{Cause, Error, GroupFailure, Result, hash};
use candle_core::{CudaDevice, Device, DeviceLocation, Tensor};
use cudarc::driver::CudaStream;
use parking_lot::Mutex;
use smallvec::smallvec;
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// One rank's handle to a group whose members have a GPU each.
pub(crate) struct NcclBackend {
    rank: Arc<NcclRank>,
    device: Device,
    ranks: Vec<usize>,
    me: usize,
    id: u64,
    /// Whether this is the group of all ranks, whose end is the end of the rank.
    is_world: bool,
    /// Created by the first call, because many groups are never used.
    comm: Mutex<Option<Arc<NcclComm>>>,
    /// The latest call that a thread of its own enqueues. Those after it come later.
    latest: Mutex<Option<Arc<LaterLaunch>>>,
    rounds: AtomicU64,
    outboxes: Mutex<HashMap<(usize, u32), LaneSender>>,
    inboxes: Mutex<HashMap<(usize, u32), Inbox>>,
}

/// The receiving end of the messages of one rank with one tag.
struct Inbox {
    comm: Arc<NcclComm>,
    received: u64,
}

impl std::fmt::Debug for NcclBackend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "NcclBackend(rank {} of {:?} on GPU {})", self.me, self.ranks, self.rank.gpu())
    }
}

impl NcclBackend {
    /// Creates the handle of a rank in a world of `size` ranks, which uses the GPU of `device`.
    pub(crate) fn world(watch: WorldWatch, device: &Device, size: usize, terms: RankTerms) -> Result<Self> {
        check_version(library_version()?).map_err(Error::Unsupported)?;
        devices::check(std::slice::from_ref(device))?;
        let me = watch.rank();
        let mut world =
            Self::join(NcclRank::new(watch, device, terms)?, (0..size).collect(), me, device.clone());
        world.is_world = true;
        Ok(world)
    }

    fn join(rank: Arc<NcclRank>, ranks: Vec<usize>, me: usize, device: Device) -> Self {
        let id = rank.next_group(&ranks);
        let (comm, latest, rounds) = (Mutex::default(), Mutex::default(), AtomicU64::new(0));
        let (outboxes, inboxes) = (Mutex::default(), Mutex::default());
        Self { rank, device, ranks, me, id, is_world: false, comm, latest, rounds, outboxes, inboxes }
    }

    fn comm(&self) -> Result<Arc<NcclComm>> {
        let mut comm = self.comm.lock();
        match &*comm {
            Some(comm) => Ok(comm.clone()),
            None => {
                let members = CommMembers { name: self.id, ranks: &self.ranks, me: self.me };
                Ok(comm.insert(self.rank.connect(members, self.rank.ctas.group)?).clone())
            }
        }
    }

    fn enter(&self, call: &Arc<Call>) -> Result<WorldGuard<'_>> {
        transfer::check(call)?;
        let round = self.rounds.fetch_add(1, Ordering::Relaxed);
        let inside = self.rank.watch.enter(self.id, &self.ranks, round, call)?;
        if call.form != Form::Started {
            self.rank.wait_for_members(self.id, round)?;
        }
        Ok(inside)
    }

    /// Returns the tensors in this rank's GPU memory. Host tensors are copied there.
    fn on_gpu(&self, op: Op, tensors: Tensors) -> Result<Tensors> {
        let place = |tensor: Tensor| match tensor.device().location() {
            DeviceLocation::Cpu => Ok(tensor.to_device(&self.device)?),
            DeviceLocation::Cuda { gpu_id } if gpu_id == self.rank.gpu() => Ok(tensor),
            other => {
                let reason =
                    format!("a tensor on {other:?}; this rank has GPU {}: move it there", self.rank.gpu());
                Err(Error::InvalidArgument { rank: self.ranks[self.me], op: op.name(), reason })
            }
        };
        tensors.into_iter().map(place).collect()
    }

    /// Enqueues the call after the work on the streams of its tensors.
    fn launch(&self, call: Arc<Call>, tensors: Tensors) -> Result<EnqueuedCall> {
        // The ranks of a scatter have no tensor that says on which device they want theirs.
        let is_scatter = call.op() == Op::Scatter;
        let is_cpu = |tensor: &Tensor| tensor.device().is_cpu();
        let on_host = |i| !is_scatter && tensors.get(i).map_or(call.device == DeviceLocation::Cpu, is_cpu);
        let count = call.count();
        let to_host: Vec<bool> = (0..count).map(on_host).collect();
        let tensors = self.on_gpu(call.op(), tensors)?;
        let device = match tensors.first().map(Tensor::device) {
            Some(Device::Cuda(device)) => device.clone(),
            _ => self.rank.device.clone(),
        };
        let main = device.cuda_stream();
        let prepared = Arc::new(TensorTransfer::of_call(&device, &call, self.me, &tensors)?);
        // Tensors of one GPU may have been made and packed for different `Device`s, each with its own stream.
        let mut streams = other_streams(&tensors, &main);
        let others = streams.clone();
        streams.push(main.clone());
        let launch = Some(self.enqueue(PriorWork::on(&streams)?, call, &prepared)?);
        let rank = self.rank.clone();
        Ok(EnqueuedCall { rank, device, main, others, launch, prepared, to_host, kept: tensors })
    }

    /// Enqueues a call after the others of this group.
    fn enqueue(
        &self,
        after: PriorWork,
        call: Arc<Call>,
        prepared: &Arc<Vec<TensorTransfer>>,
    ) -> Result<CallLaunch> {
        let comm = self.comm()?;
        let mut latest = self.latest.lock();
        let is_held_up = latest.as_ref().is_some_and(|latest| !latest.is_over());
        let waits = is_held_up || self.rank.assemblies.is_some() || comm.has_to_meet(exchanges(prepared));
        if call.form == Form::Started && waits {
            let prepared = prepared.clone();
            let pending = self.rank.assemblies.is_some().then(|| PendingCall::new(&self.rank));
            let enqueue = move || {
                let issued = issue(&comm, &after, &call, &prepared);
                drop(pending);
                issued
            };
            let later = LaterLaunch::start(latest.take(), enqueue)?;
            *latest = Some(later.clone());
            return Ok(CallLaunch::Later(later));
        }
        latest.take().into_iter().for_each(|before| before.wait());
        issue(&comm, &after, &call, prepared).map(CallLaunch::Enqueued)
    }

    /// Enqueues a barrier: each member gathers a word of every member, which depends on the description of its call.
    fn launch_barrier(&self, call: &Call) -> Result<EnqueuedCall> {
        let words = call.note.as_ref().map_or(0, |note| hash::stable(note.as_bytes()) as i64);
        let mine = Tensor::new(&[words], &Device::Cpu)?;
        let gather = Collective::all_gather(Cut::even(0, 1, self.ranks.len()));
        let gather = Call { form: call.form, ..Call::on(gather, &mine) };
        self.launch(Arc::new(gather), smallvec![mine])
    }

    /// Waits on the host until all ranks have arrived, and fails unless all made the same call.
    fn meet(&self, call: &Call) -> Result<()> {
        let mut flight = self.launch_barrier(call)?;
        flight.arrive()?;
        let all = flight.land()?.into_iter().map(|made| made.into_tensor().to_vec1::<i64>());
        let all = all.collect::<candle_core::Result<Vec<_>>>()?.concat();
        match all.iter().position(|&other| other != all[0]) {
            None => Ok(()),
            Some(other) => {
                let (rank, reference) = (self.ranks[other], self.ranks[0]);
                Err(self.rank.watch.fail(Cause::Mismatch { rank, reference, what: "description" }))
            }
        }
    }

    /// Runs a call whose result overwrites its input on the GPU.
    fn run_in_place(&self, call: Call, tensors: Tensors) -> Result<()> {
        let call = Arc::new(call);
        let _inside = self.enter(&call)?;
        let placed = self.on_gpu(call.op(), tensors)?;
        let Device::Cuda(device) = placed[0].device() else { return Ok(()) };
        let comm = self.comm()?;
        self.latest.lock().take().into_iter().for_each(|before| before.wait());
        issue_in_place(&self.rank, &comm, &device.cuda_stream(), &call, &placed[0])
    }

    /// Sends a message, without waiting.
    fn send(&self, call: Call, (to, tag): (usize, u32), tensors: Tensors) -> Result<()> {
        self.rank.watch.check()?;
        self.rank.lanes.check()?;
        transfer::check(&call)?;
        let (ends, call) = ([self.ranks[self.me], self.ranks[to]], Arc::new(call));
        let mut outboxes = self.outboxes.lock();
        let outbox = match outboxes.entry((to, tag)) {
            Entry::Occupied(outbox) => outbox.into_mut(),
            Entry::Vacant(vacant) => {
                vacant.insert(LaneSender::open(&self.rank, channel(self.id, self.me, to, tag), ends)?)
            }
        };
        let _inside = self.rank.watch.enter(outbox.id, &ends, outbox.sent, &call)?;
        let tensors = self.on_gpu(Op::Send, tensors)?;
        tensors.into_iter().try_for_each(|tensor| outbox.push(&self.rank, tensor))
    }

    /// Receives a message to the GPU.
    fn receive(&self, call: Arc<Call>, (from, tag): (usize, u32)) -> Result<Tensor> {
        self.rank.watch.check()?;
        transfer::check(&call)?;
        let (id, ends) = (channel(self.id, from, self.me, tag), [self.ranks[from], self.ranks[self.me]]);
        // One lock for all channels: a rank that receives on two threads at once uses two groups.
        let mut inboxes = self.inboxes.lock();
        let received = inboxes.get(&(from, tag)).map_or(0, |inbox| inbox.received);
        let _inside = self.rank.watch.enter(id, &ends, received, &call)?;
        let inbox = match inboxes.entry((from, tag)) {
            Entry::Occupied(inbox) => inbox.into_mut(),
            Entry::Vacant(vacant) => {
                vacant.insert(Inbox { comm: open_receiver(&self.rank, id, ends)?, received: 0 })
            }
        };
        inbox.received += 1;
        let (watch, mut is_posted) = (&self.rank.watch, false);
        let is_sent = || {
            if !std::mem::replace(&mut is_posted, true) {
                watch.post(self.ranks[from], id, received);
            }
            watch.is_sent(id, received)
        };
        Ok(issue_receive(&self.rank, &inbox.comm, &call, 0, is_sent)?.into_tensor())
    }
}

/// Returns the streams of tensors that are not on `main`.
fn other_streams(tensors: &[Tensor], main: &Arc<CudaStream>) -> Vec<Arc<CudaStream>> {
    let streams = tensors.iter().filter_map(|tensor| match tensor.device() {
        Device::Cuda(device) => Some(device.cuda_stream()),
        _ => None,
    });
    streams.filter(|stream| stream.cu_stream() != main.cu_stream()).collect()
}

/// A call that is enqueued on the GPU.
struct EnqueuedCall {
    rank: Arc<NcclRank>,
    device: CudaDevice,
    /// The stream on which the tensors are used and freed.
    main: Arc<CudaStream>,
    /// Other streams on which tensors are freed.
    others: Vec<Arc<CudaStream>>,
    /// The call, until the streams wait for its end.
    launch: Option<CallLaunch>,
    prepared: Arc<Vec<TensorTransfer>>,
    /// Whether each result goes to the host.
    to_host: Vec<bool>,
    /// The tensors that the call reads. They may be freed on `main` once that stream waits for the call.
    kept: Tensors,
}

impl EnqueuedCall {
    /// Waits on the host until the GPU has reached the end of the call.
    fn arrive(&mut self) -> Result<()> {
        let Some(launch) = self.launch.take() else { return Ok(()) };
        let done = launch.wait()?;
        self.launch = Some(CallLaunch::Enqueued(done.clone()));
        self.rank.wait(&done)
    }

    /// Returns the results. `main` waits for them, the host does not.
    fn land(mut self) -> Result<Results> {
        if let Some(launch) = self.launch.take() {
            let done = launch.wait()?;
            self.rank.rejoin(&self.main, &done)?;
            self.others.iter().try_for_each(|other| other.wait(&done)).map_err(driver)?;
        }
        let shared = || Error::Unsupported("a call that is still being enqueued".to_string());
        let prepared = Arc::into_inner(std::mem::take(&mut self.prepared)).ok_or_else(shared)?;
        let mut results = Results::new();
        for (made, &to_host) in transfer::land(&self.device, prepared)?.into_iter().zip(&self.to_host) {
            let Some(made) = made else { continue };
            if !to_host {
                results.push(made);
                continue;
            }
            let copy = made.into_tensor().to_device(&Device::Cpu)?;
            // An abort ends the call and the copy, which then holds nothing. It comes after the failure is recorded.
            self.rank.watch.check()?;
            results.push(Fresh::copy_of(&copy)?);
        }
        Ok(results)
    }
}

impl Drop for EnqueuedCall {
    fn drop(&mut self) {
        // Memory that is freed now must not be reused before NCCL is done with it. A drop cannot return errors.
        if let Some(Ok(done)) = self.launch.take().map(CallLaunch::wait) {
            let _ = self.main.wait(&done);
            self.others.iter().for_each(|other| _ = other.wait(&done));
        }
        self.kept.clear();
    }
}

/// A started collective.
struct NcclCall {
    flight: EnqueuedCall,
    is_barrier: bool,
}

impl Drop for NcclBackend {
    fn drop(&mut self) {
        if self.is_world {
            self.rank.lanes.end();
        }
        let outboxes = std::mem::take(self.outboxes.get_mut());
        let inboxes = std::mem::take(self.inboxes.get_mut());
        let received: Vec<u64> =
            inboxes.keys().map(|&(from, tag)| channel(self.id, from, self.me, tag)).collect();
        let channels: Vec<u64> =
            outboxes.values().map(|outbox| outbox.id).chain(received.iter().copied()).collect();
        self.latest.get_mut().take().into_iter().for_each(|latest| latest.wait());
        // Their ends wait for calls under way, in which a rank that returns is still missed.
        drop((outboxes, inboxes, self.comm.get_mut().take()));
        self.rank.watch.forget_receives(&received);
        self.rank.watch.forget(self.id, &channels, self.ranks.len());
        if self.is_world {
            self.rank.parked.end();
            self.rank.wait_for_aborts();
        }
    }
}

impl StartedCall for NcclCall {
    fn is_ready(&self) -> Result<bool> {
        self.flight.rank.watch.check()?;
        self.flight.launch.as_ref().map_or(Ok(true), CallLaunch::is_complete)
    }

    fn finish(mut self: Box<Self>) -> Result<Results> {
        self.flight.rank.watch.check()?;
        if self.is_barrier {
            return self.flight.arrive().map(|()| Results::new());
        }
        self.flight.land()
    }
}

impl Backend for NcclBackend {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn rank(&self) -> usize {
        self.me
    }

    fn ranks(&self) -> &[usize] {
        &self.ranks
    }

    fn device(&self) -> &Device {
        &self.device
    }

    fn run(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Results> {
        match (&call.collective, call.form) {
            (&Collective::Send { to, tag }, _) => {
                return self.send(call, (to, tag), tensors).map(|()| Results::new());
            }
            (_, Form::Monitored) => {
                return Err(unsupported(self.name(), "name the ranks that are missing at a barrier"));
            }
            // Where NaN is marked, the result needs memory of its own.
            (_, Form::InPlace)
                if call.device != DeviceLocation::Cpu && !marks::needed(&call, tensors[0].dtype()) =>
            {
                return self.run_in_place(call, tensors).map(|()| Results::new());
            }
            _ => {}
        }
        let call = Arc::new(call);
        let _inside = self.enter(&call)?;
        if call.op() == Op::Barrier {
            return self.meet(&call).map(|()| Results::new());
        }
        let made = fill(&outputs, self.launch(call, tensors)?.land()?)?;
        // A failure of the world may have ended the call that a copy to the host waited for.
        if outputs.is_empty() { Ok(made) } else { self.rank.watch.check().map(|()| made) }
    }

    fn start(&self, call: Call, tensors: Tensors, outputs: Tensors) -> Result<Box<dyn StartedCall>> {
        if let Collective::Send { to, tag } = call.collective {
            return self.send(call, (to, tag), tensors).map(|()| completed(Results::new()));
        }
        let call = Arc::new(call);
        let _inside = self.enter(&call)?;
        let is_barrier = call.op() == Op::Barrier;
        let flight = if is_barrier { self.launch_barrier(&call)? } else { self.launch(call, tensors)? };
        Ok(filled(Box::new(NcclCall { flight, is_barrier }), outputs))
    }

    fn recv(&self, call: Call, output: Option<&Tensor>) -> Result<(usize, Tensor)> {
        let (Some(from), tag) = (call.collective.peer(), call.collective.tag()) else {
            return Err(unsupported(self.name(), "receive from any rank"));
        };
        let message = self.receive(Arc::new(call), (from, tag))?;
        let is_copied = output.is_some_and(|output| !output.device().same_device(message.device()));
        let delivered = deliver(from, message, output)?;
        // A failure of the world may have ended the transfer that the copy waited for.
        self.failure().filter(|_| is_copied).map_or(Ok(delivered), |failure| Err(Error::Group(failure)))
    }

    fn finish(&self) -> Result<()> {
        // Messages are delivered, or their receivers leave.
        self.rank.lanes.end();
        self.rank.settle();
        self.rank.watch.check()
    }

    fn subgroup(&self, members: &[usize]) -> Result<Arc<dyn Backend>> {
        let ranks: Vec<usize> = members.iter().map(|&member| self.ranks[member]).collect();
        let me =
            members.iter().position(|&member| member == self.me).ok_or_else(|| Error::InvalidArgument {
                rank: self.ranks[self.me],
                op: "subgroup",
                reason: format!("only members create a group, and this rank is not in {ranks:?}"),
            })?;
        self.rank.watch.check()?;
        Ok(Arc::new(Self::join(self.rank.clone(), ranks, me, self.device.clone())))
    }

    fn stop(&self, cause: Cause) {
        self.rank.watch.fail(cause);
    }

    fn failure(&self) -> Option<Arc<GroupFailure>> {
        self.rank.watch.failure()
    }
}
