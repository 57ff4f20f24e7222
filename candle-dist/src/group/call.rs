//! A collective in any form: of several tensors, into given memory, over a variable, or started.
use super::ProcessGroup;
use super::pending::{Pending, PendingState, PendingTensors, single};
use crate::backend::overwrite::overwrite;
use crate::backend::storage::share_memory;
use crate::backend::{Call, Dims, Envelope, Form, Fresh, Tensors, bytes};
use crate::call::{Collective, Op};
use crate::{Error, Result};
use candle_core::{DType, Shape, Tensor, Var};
use std::time::Duration;

/// A collective that is about to run on a group, made by [`ProcessGroup::call`].
///
/// The methods that return `Self` set its form. [`run`](Self::run), [`start`](Self::start) and the others then make the
/// call, on one tensor or on several. Those that take a list return the results in order: none on ranks that get none.
#[must_use = "`run` or `start` makes the call"]
#[derive(Debug)]
pub struct CollectiveCall<'a> {
    group: &'a ProcessGroup,
    /// The call, without its tensors.
    call: Call,
    /// The shape and dtype of data that other ranks have.
    shape: Option<(Shape, DType)>,
    outputs: Tensors,
    memory: InputMemory,
}

/// What a started call reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum InputMemory {
    /// Copies of its tensors.
    Copied,
    /// The tensors themselves, which the caller has promised not to write to.
    Owned,
}

impl InputMemory {
    /// Returns a tensor whose memory does not change.
    pub(super) fn own(self, tensor: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            // Memory without elements cannot change, and candle cannot copy it on each device.
            Self::Copied if tensor.elem_count() > 0 => tensor.force_contiguous(),
            Self::Copied | Self::Owned => Ok(tensor.clone()),
        }
    }
}

impl ProcessGroup {
    /// Prepares a collective, or one side of a message, that runs in any form.
    ///
    /// | form | |
    /// |---|---|
    /// | `group.call(c).run(&x)` | one tensor, as the method of the collective's name |
    /// | `group.call(c).run_all(&xs)` | several tensors in one call |
    /// | `group.call(c).into(&out).run(&x)` | the result goes to given memory |
    /// | `group.call(c).in_place(&var)` | the result replaces the input |
    /// | `group.call(c).start(&x)` | the result comes with [`Pending::wait`] |
    /// | `group.call(c).owned().start(&x)` | the same, without a copy of the input |
    ///
    /// ```
    /// use candle_core::{Device, Tensor, Var};
    /// use candle_dist::{Collective, Op, ReduceOp, World, comm};
    ///
    /// World::threads(2).run(|ctx| -> candle_dist::Result<()> {
    ///     let (sum, group) = (Collective::AllReduce(ReduceOp::Sum), ctx.group());
    ///     let xs = [Tensor::new(&[1f32, 2.0], &Device::Cpu)?, Tensor::new(&[3u32], &Device::Cpu)?];
    ///     let (sums, counts) = comm::record(|| group.call(sum.clone()).run_all(&xs));
    ///     assert_eq!(sums?[1].to_vec1::<u32>()?, [6]);
    ///     assert_eq!(counts.get(Op::AllReduce).count, 1);
    ///
    ///     let started = group.call(sum.clone()).start(&xs[0])?;
    ///     let var = Var::new(&[1f32], &Device::Cpu)?;
    ///     group.call(sum).in_place(&var)?;
    ///     assert_eq!(var.to_vec1::<f32>()?, [2.0]);
    ///     assert_eq!(started.wait()?.to_vec1::<f32>()?, [2.0, 4.0]);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    #[track_caller]
    pub fn call(&self, collective: Collective) -> CollectiveCall<'_> {
        let call = Call::new(collective);
        CollectiveCall {
            group: self,
            call,
            shape: None,
            outputs: Tensors::new(),
            memory: InputMemory::Copied,
        }
    }
}

impl CollectiveCall<'_> {
    /// Names the shape and dtype of data that other ranks have: the root's tensor of a scatter, or a message.
    pub fn of(self, shape: impl Into<Shape>, dtype: DType) -> Self {
        Self { shape: Some((shape.into(), dtype)), ..self }
    }

    /// Writes the result to `output`. Called once for each tensor of the call.
    ///
    /// An output is a contiguous tensor of the result's shape and dtype on the input's device, in memory that is neither
    /// the input's nor any other rank's. It may be a `Var`, or any tensor that is not part of a graph. Other ranks may
    /// make the same call without an output. Calls whose results only the root gets take none.
    pub fn into(mut self, output: &Tensor) -> Self {
        self.outputs.push(output.clone());
        self
    }

    /// Reads the tensors themselves where the call is started, or is a message, not copies.
    ///
    /// For tensors that nobody writes to until every rank has waited. A write before may change the results, and over MPI
    /// it waits until the call no longer reads the memory. A message is sent in constant time if ranks share memory.
    pub fn owned(self) -> Self {
        Self { memory: InputMemory::Owned, ..self }
    }

    /// Names every missing rank if some do not come within `timeout`, for barriers: to find ranks that hang.
    ///
    /// The timeouts of the group and the world are ignored. Between processes it takes messages of each rank through rank 0
    /// of the world, so do not call it in every step. It does not meet a barrier without a monitor.
    ///
    /// ```
    /// use candle_dist::{Collective, World};
    /// use std::time::Duration;
    ///
    /// let outcome = World::threads(4).run(|ctx| -> candle_dist::Result<()> {
    ///     if ctx.rank() % 2 == 1 {
    ///         std::thread::sleep(Duration::from_millis(300)); // too late
    ///     }
    ///     ctx.group().call(Collective::Barrier).monitored(Duration::from_millis(50)).run_all(&[]).map(drop)
    /// });
    /// let text = outcome.unwrap_err().message;
    /// assert!(text.contains("ranks 1, 3 did not come to the barrier within 50ms"), "{text}");
    /// ```
    ///
    /// # Errors
    /// The call's error is [`Cause::Missing`](crate::Cause::Missing) with the ranks of the world that did not call in
    /// time: the world stops, and all ranks get the same error. Also if the backend does not support it, or the call is
    /// no barrier.
    pub fn monitored(mut self, timeout: Duration) -> Self {
        (self.call.form, self.call.timeout) = (Form::Monitored, Some(timeout));
        self
    }

    /// Runs the call on one tensor, and returns this rank's result.
    ///
    /// A receive has no tensor, nor does a rank of a scatter that is not the root: they give `None`.
    ///
    /// # Errors
    /// Also if some ranks of such a call have no result: see [`run_all`](Self::run_all).
    pub fn run<'t>(self, tensor: impl Into<Option<&'t Tensor>>) -> Result<Tensor> {
        let tensor = tensor.into();
        self.check_single(tensor)?;
        single(self.run_all(tensor.map_or(&[], std::slice::from_ref))?)
    }

    /// Runs the call on several tensors, each with its own cut, and returns this rank's results in order.
    ///
    /// Only the root of a scatter gives a tensor; a barrier and the receiver of a message have none. A call of no tensors
    /// that needs some does nothing.
    pub fn run_all(self, tensors: &[Tensor]) -> Result<Vec<Tensor>> {
        if self.call.op() == Op::Recv {
            let call = self.of_one_sender(tensors.len())?;
            return Ok(vec![self.group.receive(call, self.places().pop())?]);
        }
        let tensors = self.read(tensors);
        let Some(call) = self.described(tensors)? else { return Ok(Vec::new()) };
        let (group, outputs) = (self.group, self.places());
        if call.op() == Op::Send {
            return group.send_now(call, &tensors[0], self.memory).map(|()| Vec::new());
        }
        match group.exchange(call, tensors, outputs.clone())? {
            None => results_alone(tensors.to_vec(), &outputs),
            Some(made) if outputs.is_empty() => Ok(made.into_iter().map(Fresh::into_tensor).collect()),
            Some(_) => Ok(outputs.to_vec()),
        }
    }

    /// Receives the next message with the tag of a [`Collective::Recv`], and returns its sender too, which may be any rank.
    ///
    /// Messages of one sender arrive in order; messages of different senders have no order.
    ///
    /// ```
    /// use candle_core::{DType, Device, Tensor};
    /// use candle_dist::{Collective, World};
    ///
    /// World::threads(3).run(|ctx| -> candle_dist::Result<()> {
    ///     let g = ctx.group();
    ///     if ctx.rank() > 0 {
    ///         return g.send(&Tensor::new(&[ctx.rank() as u32], &Device::Cpu)?, 0);
    ///     }
    ///     let from_any = || g.call(Collective::Recv { from: None, tag: 0 });
    ///     for _ in 1..3 {
    ///         let (from, tensor) = from_any().of(1, DType::U32).receive()?;
    ///         assert_eq!(tensor.to_vec1::<u32>()?, [from as u32]);
    ///     }
    ///     assert_eq!(from_any().probe()?, None);
    ///     Ok(())
    /// })?;
    /// # Ok::<(), candle_dist::WorldError>(())
    /// ```
    ///
    /// # Errors
    /// Also if started receives with this tag of any rank have not been waited for, or the backend cannot receive from any
    /// rank.
    pub fn receive(self) -> Result<(usize, Tensor)> {
        self.check_receive()?;
        match self.call.collective.peer() {
            Some(from) => Ok((from, self.run(None)?)),
            None => self.group.receive_any(self.expected(0)?, self.places().pop()),
        }
    }

    /// Describes the oldest unreceived message that has arrived for a [`Collective::Recv`], of its sender or of any rank;
    /// `None` if there is none now. Started receives get their messages first.
    ///
    /// # Errors
    /// Also if the backend cannot probe.
    pub fn probe(self) -> Result<Option<Envelope>> {
        self.check_receive()?;
        self.check_ranks()?;
        self.group.probe(&self.call)
    }

    /// Starts the call on one tensor.
    ///
    /// A start does not wait for other ranks, with one exception: over MPI, that of a collective waits while 4096
    /// collectives of this rank are incomplete. It reads a copy of the tensor, unless that is [`owned`](Self::owned).
    ///
    /// # Errors
    /// Also if some ranks of such a call have no result: see [`start_all`](Self::start_all).
    pub fn start<'t>(self, tensor: impl Into<Option<&'t Tensor>>) -> Result<Pending> {
        let tensor = tensor.into();
        self.check_single(tensor)?;
        Ok(self.start_all(tensor.map_or(&[], std::slice::from_ref))?.with(single))
    }

    /// Starts the call on several tensors, as [`run_all`](Self::run_all) runs it.
    pub fn start_all(self, tensors: &[Tensor]) -> Result<PendingTensors> {
        if self.call.op() == Op::Recv {
            let call = self.of_one_sender(tensors.len())?;
            return self.group.start_receive(call, self.places().pop());
        }
        if self.call.form == Form::Monitored {
            return Err(self.invalid("a barrier is monitored while it waits; call `run_all`".to_string()));
        }
        let tensors = self.read(tensors);
        let Some(call) = self.described(tensors)? else {
            return Ok(Pending::new(PendingState::Done(Vec::new()), Ok));
        };
        let (group, outputs, memory) = (self.group, self.places(), self.memory);
        if call.op() == Op::Send {
            return Ok(Pending::new(group.start_send(call, &tensors[0], memory)?, Ok));
        }
        if group.is_alone(&call)? {
            let mine = tensors.iter().map(|tensor| memory.own(tensor)).collect::<candle_core::Result<_>>()?;
            return Ok(Pending::new(PendingState::Done(results_alone(mine, &outputs)?), Ok));
        }
        let call = Call { form: Form::Started, ..call };
        let size = tensors.iter().map(bytes).sum();
        let state = group.open(call, size, outputs.clone(), |backend, call| {
            let dense = tensors.iter().map(|tensor| memory.own(&tensor.detach())?.contiguous());
            backend.start(call, dense.collect::<candle_core::Result<Tensors>>()?, outputs)
        })?;
        Ok(Pending::new(state, Ok))
    }

    /// Replaces `var` on every rank by its result: for an all_reduce and a broadcast, without memory for a second tensor.
    pub fn in_place(self, var: &Var) -> Result<()> {
        let Some(call) = self.described(std::slice::from_ref(var))? else { return Ok(()) };
        let group = self.group;
        if !matches!(call.op(), Op::AllReduce | Op::Broadcast) || !self.outputs.is_empty() {
            let fix = "only all_reduce and broadcast can, without another output; use `into` or `run`";
            return Err(group.invalid(call.op(), format!("a call in place: {fix}")));
        }
        if group.is_alone(&call)? {
            return Ok(());
        }
        let call = Call { form: Form::InPlace, ..call };
        let place = var.as_detached_tensor();
        let place = || [place.clone()].into_iter().collect();
        group.engage(call, bytes(var), |backend, call| backend.run(call, place(), place())).map(drop)
    }

    /// Returns the memory for the results.
    fn places(&self) -> Tensors {
        self.outputs.iter().map(Tensor::detach).collect()
    }

    /// Returns the tensors that this rank gives: only that of a scatter's root is read.
    fn read<'t>(&self, tensors: &'t [Tensor]) -> &'t [Tensor] {
        let is_read = self.call.op() != Op::Scatter || self.call.collective.has_input(self.group.rank());
        if is_read { tensors } else { &[] }
    }

    /// Describes the message that a receive of one sender expects.
    fn of_one_sender(&self, given: usize) -> Result<Call> {
        if self.call.collective.peer().is_none() {
            let tag = self.call.collective.tag();
            return Err(self.invalid(format!("no sender of tag {tag}; name one, or call `receive`")));
        }
        self.expected(given)
    }

    /// Describes the message that a receive expects, which takes no tensor and at most one output.
    fn expected(&self, given: usize) -> Result<Call> {
        self.check_ranks()?;
        if given > 0 || self.outputs.len() > 1 || self.call.form == Form::Monitored {
            let reason = "a receive takes no tensor, at most one output, and no monitor".to_string();
            return Err(self.invalid(reason));
        }
        let named = self.shape.as_ref().map(|(shape, dtype)| (shape, *dtype));
        let output = self.outputs.first();
        let Some((shape, dtype)) = named.or_else(|| output.map(|output| (output.shape(), output.dtype())))
        else {
            let reason = "a message of unknown shape; name it with `of` or `into`".to_string();
            return Err(self.invalid(reason));
        };
        output.map_or(Ok(()), |output| self.check_memory(output, shape.dims(), dtype))?;
        Ok(Call { dtype: Some(dtype), shape: Dims::from_slice(shape.dims()), ..self.call.clone() })
    }

    /// Checks the arguments, and describes the call on these tensors; `None` if there is nothing to do.
    fn described(&self, tensors: &[Tensor]) -> Result<Option<Call>> {
        let collective = &self.call.collective;
        self.check_ranks()?;
        self.check_count(tensors.len())?;
        if let Collective::Scatter { .. } = collective {
            return self.scattered(tensors.first()).map(Some);
        }
        for (nth, tensor) in tensors.iter().enumerate() {
            self.group.check_fit(collective, nth, tensor)?;
        }
        if tensors.is_empty() && collective.has_input(self.group.rank()) {
            return Ok(None);
        }
        let Call { form, timeout, site, .. } = self.call;
        let call = Call { form, timeout, site, ..Call::on_all(collective.clone(), tensors) };
        self.check_outputs(&call, tensors)?;
        Ok(Some(call))
    }

    /// Describes a scatter of a tensor, which the root has.
    fn scattered(&self, tensor: Option<&Tensor>) -> Result<Call> {
        let Some((shape, dtype)) = &self.shape else {
            return Err(self.invalid("a tensor of unknown shape; all ranks name it with `of`".to_string()));
        };
        let (rank, size) = (self.group.rank(), self.group.size());
        self.call.collective.check(0, shape.dims(), rank, size).map_err(|reason| self.invalid(reason))?;
        let fits = tensor.is_some_and(|tensor| tensor.shape() == shape && tensor.dtype() == *dtype);
        if self.call.collective.has_input(rank) && !fits {
            let got = tensor.map_or("none".to_string(), |t| format!("{:?} {}", t.dims(), t.dtype().as_str()));
            let (shape, dtype) = (shape.dims(), dtype.as_str());
            return Err(self.invalid(format!("the root must give a tensor of {shape:?} {dtype}, got {got}")));
        }
        self.check_output_count(1)?;
        if let Some(output) = self.outputs.first() {
            self.check_memory(output, &self.call.collective.output(0, shape.dims(), rank), *dtype)?;
            tensor.map_or(Ok(()), |tensor| self.check_beside(output, tensor))?;
        }
        Ok(Call { dtype: Some(*dtype), shape: Dims::from_slice(shape.dims()), ..self.call.clone() })
    }

    fn invalid(&self, reason: String) -> Error {
        self.group.invalid(self.call.op(), reason)
    }

    /// Refuses a call that is no receive.
    fn check_receive(&self) -> Result<()> {
        match self.call.op() {
            Op::Recv => Ok(()),
            _ => Err(self.invalid("only a receive has a sender; call `run_all`".to_string())),
        }
    }

    fn check_ranks(&self) -> Result<()> {
        self.group.check_ranks(&self.call.collective)
    }

    /// Refuses a call with a result on some ranks where one on each rank is asked for, on all ranks alike, and one without a
    /// tensor where each rank gives one.
    fn check_single(&self, tensor: Option<&Tensor>) -> Result<()> {
        if !self.call.collective.all_have_results() {
            return Err(self.invalid("some ranks get no result; call `run_all` or `start_all`".to_string()));
        }
        let needs = self.call.op() != Op::Scatter && self.call.collective.has_input(self.group.rank());
        match needs && tensor.is_none() {
            true => Err(self.invalid("no tensor; each rank gives one".to_string())),
            false => Ok(()),
        }
    }

    /// Refuses another number of tensors than the collective takes.
    fn check_count(&self, given: usize) -> Result<()> {
        let collective = &self.call.collective;
        if self.call.form == Form::Monitored && collective.op() != Op::Barrier {
            return Err(self.invalid("only barriers are monitored".to_string()));
        }
        if self.shape.is_some() && collective.op() != Op::Scatter {
            return Err(self.invalid(
                "the shape is that of the tensor; only scatters and receives name one".to_string(),
            ));
        }
        if collective.takes_several() {
            let cuts = collective.cuts().len();
            return match matches!(collective.op(), Op::AllGather | Op::ReduceScatter) && cuts != given {
                true => {
                    Err(self.invalid(format!("{cuts} cuts for {given} tensors; give one for each tensor")))
                }
                false => Ok(()),
            };
        }
        let takes = usize::from(collective.has_input(self.group.rank()));
        match given == takes || collective.op() == Op::Scatter && given == 0 {
            true => Ok(()),
            false => Err(self.invalid(format!("{given} tensors in a call; it takes {takes}"))),
        }
    }

    /// Refuses memory that cannot hold the results of `call` on these tensors.
    fn check_outputs(&self, call: &Call, tensors: &[Tensor]) -> Result<()> {
        self.check_output_count(if call.collective.all_have_results() { tensors.len() } else { 0 })?;
        for (nth, (output, tensor)) in self.outputs.iter().zip(tensors).enumerate() {
            let shape = call.collective.output(nth, tensor.dims(), self.group.rank());
            self.check_memory(output, &shape, tensor.dtype())?;
            tensors.iter().try_for_each(|tensor| self.check_beside(output, tensor))?;
        }
        Ok(())
    }

    /// Refuses another number of outputs than that of results on all ranks, and outputs in one memory.
    fn check_output_count(&self, results: usize) -> Result<()> {
        let given = self.outputs.len();
        if given > 0 && given != results {
            return Err(self.invalid(format!("{given} outputs; this call takes {results}")));
        }
        let mut pairs = self.outputs.iter().enumerate();
        if pairs.any(|(i, output)| self.outputs[..i].iter().any(|other| share_memory(other, output))) {
            return Err(self.invalid("two outputs lie in one memory; give each its own".to_string()));
        }
        Ok(())
    }

    /// Refuses an output on another device than an input, or in its memory.
    fn check_beside(&self, output: &Tensor, input: &Tensor) -> Result<()> {
        let (here, there) = (input.device().location(), output.device().location());
        if here != there {
            let reason =
                format!("the output is on {there:?} and the input on {here:?}; give one on {here:?}");
            return Err(self.invalid(reason));
        }
        if share_memory(input, output) {
            let reason = "the output lies in the memory of the input; give memory of its own";
            return Err(self.invalid(reason.to_string()));
        }
        Ok(())
    }

    /// Refuses memory that cannot hold `shape` of `dtype`, or that a backward pass may still need.
    fn check_memory(&self, output: &Tensor, shape: &[usize], dtype: DType) -> Result<()> {
        if output.dims() != shape || output.dtype() != dtype || !output.is_contiguous() {
            let (got, is) = (output.dims(), output.dtype().as_str());
            let strided = if output.is_contiguous() { "" } else { " that is not contiguous" };
            let name = dtype.as_str();
            let reason = format!(
                "the output must be a contiguous {name} tensor of {shape:?}, got {is} {got:?}{strided}"
            );
            return Err(self.invalid(reason));
        }
        if output.track_op() && !output.is_variable() {
            let reason = "the output is part of a graph, whose backward pass may need its values; give a Var or detach it";
            return Err(self.invalid(reason.to_string()));
        }
        Ok(())
    }
}

/// Returns the results of one rank alone, which are its tensors, in the given memory if there is some.
fn results_alone(tensors: Vec<Tensor>, outputs: &[Tensor]) -> Result<Vec<Tensor>> {
    if outputs.is_empty() {
        return Ok(tensors);
    }
    for (output, tensor) in outputs.iter().zip(&tensors) {
        overwrite(output, &[&tensor.detach().contiguous()?])?;
    }
    Ok(outputs.to_vec())
}
