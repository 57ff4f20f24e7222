//! One rank's run of a program: what it holds between actions, and what each action does with it.
use super::apart::apart;
use super::post::{Post, aliases};
use super::reduce::Reductions;
use super::{Batch, Runtime};
use crate::graph::{Ctx, StageDef, ValueId};
use crate::schedule::{Action, Compute, Flow, Message, Pass, Program, Span};
use crate::tape::{Activation, Gradient, Tape, WeightTape, parts};
use crate::{Error, Result, StepOptions, Value};
use candle_core::backprop::GradStore;
use candle_dist::panic_message;
use itertools::Itertools;
use std::collections::{BTreeMap, HashMap, VecDeque};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Instant;

/// A stage and a microbatch.
type At = (usize, usize);

/// What is between the passes of a microbatch on a stage.
#[derive(Default)]
struct Held {
    /// The values that the stage takes, as far as they are there.
    values: HashMap<ValueId, Activation>,
    /// The gradients of the values that the stage makes, by the stages that found them.
    gradients: HashMap<ValueId, BTreeMap<usize, Gradient>>,
    loss: Option<Value>,
    tape: Option<Tape>,
    weights: Option<WeightTape>,
}

/// What a rank has when its program is through.
#[derive(Default)]
pub(super) struct Made {
    /// The results of each microbatch, by value.
    pub(super) results: Vec<HashMap<ValueId, Value>>,
    pub(super) grads: GradStore,
    pub(super) spans: Vec<Span>,
    /// The most microbatches of stages whose backward passes were outstanding.
    pub(super) peak: usize,
}

/// A run of a program.
pub(super) struct Execution<'a> {
    runtime: &'a Runtime,
    program: &'a Program,
    batch: &'a Batch<'a>,
    post: Post<'a>,
    reductions: Reductions<'a>,
    held: HashMap<At, Held>,
    outgoing: HashMap<Message, Vec<Value>>,
    /// What is still to come from each rank, in order: taken when it is needed, so that nobody waits before.
    awaited: HashMap<usize, VecDeque<Message>>,
    made: Made,
    /// How many backward passes are outstanding.
    open: usize,
    began: Instant,
}

impl<'a> Execution<'a> {
    pub(super) fn new(runtime: &'a Runtime, program: &'a Program, batch: &'a Batch<'a>) -> Self {
        Self {
            runtime,
            program,
            batch,
            post: Post::new(&runtime.group),
            reductions: Reductions::new(runtime),
            held: HashMap::new(),
            outgoing: HashMap::new(),
            awaited: HashMap::new(),
            made: Made { results: vec![HashMap::new(); batch.len()], ..Made::default() },
            open: 0,
            began: Instant::now(),
        }
    }

    /// Does everything that this rank has to do.
    pub(super) fn run(mut self) -> Result<Made> {
        let rank = self.runtime.group.rank();
        for action in &apart(&self.program.ranks()[rank]) {
            let done = catch_unwind(AssertUnwindSafe(|| self.act(action)));
            let done = done.unwrap_or_else(|panic| Err(Error::Pipe(format!("panicked: {}", panic_message(&*panic)))));
            if let Err(error) = done {
                let error = error.in_action(self.runtime.group.ranks()[rank], action);
                // What the others wait for will not come.
                self.runtime.group.fail(&error.to_string());
                return Err(error);
            }
        }
        let left = self.held.values().any(|held| held.tape.is_some() || held.weights.is_some());
        if left || !self.outgoing.is_empty() || self.awaited.values().any(|messages| !messages.is_empty()) {
            return Err(Error::Schedule(format!("the program of rank {rank} ends with work left over")));
        }
        Ok(self.made)
    }

    fn act(&mut self, action: &Action) -> Result<()> {
        match *action {
            Action::Compute(compute) => self.timed(compute),
            Action::Overlap(pair) => pair.into_iter().try_for_each(|compute| self.timed(compute)),
            Action::Send(message) => self.send(message),
            Action::Recv(message) => {
                self.awaited.entry(self.runtime.rank_of(message.from)).or_default().push_back(message);
                Ok(())
            }
            // What is sent is handed over, and nobody waits for it.
            Action::WaitSend(_) => Ok(()),
            Action::SharedReduce(group) => self.reductions.shared(group, &mut self.made.grads),
            Action::ReduceGrad(stage) => self.reductions.start(stage, &mut self.made.grads),
            Action::WaitReduceGrad(stage) => self.reductions.finish(stage, &mut self.made.grads),
            Action::Unshard(_) | Action::Reshard(_) => {
                Err(Error::Schedule(format!("{action} of parameters that are not sharded; leave it out")))
            }
        }
    }

    fn timed(&mut self, compute: Compute) -> Result<()> {
        self.fetch(compute)?;
        let start = self.began.elapsed().as_secs_f64();
        match compute.pass {
            Pass::Forward => self.forward(compute)?,
            Pass::Backward | Pass::Input => self.backward(compute)?,
            Pass::Weight => self.weight(compute)?,
        }
        let end = self.began.elapsed().as_secs_f64();
        self.made.spans.push(Span { action: Action::Compute(compute), start, end });
        Ok(())
    }

    fn forward(&mut self, Compute { stage, microbatch, .. }: Compute) -> Result<()> {
        let module = self.runtime.stage(stage)?;
        let def = module.def();
        let mut values = std::mem::take(&mut self.held.entry((stage, microbatch)).or_default().values);
        let take = |input: &crate::graph::StageInput| match input.from {
            None => self.batch.input(microbatch, input.value).and_then(Activation::constant),
            Some(from) => values.remove(&input.value).ok_or_else(|| {
                Error::Schedule(format!(
                    "{} of stage {from} has not come",
                    self.runtime.info.graph.value_name(input.value)
                ))
            }),
        };
        let inputs: Vec<Activation> = def.inputs.iter().map(take).collect::<Result<_>>()?;
        let rows = self.batch.rows[microbatch].clone();
        let StepOptions { step, training, keep, .. } = *self.batch.options;
        let masked = self.batch.masked[microbatch].clone();
        let ctx = Ctx { microbatch, step, training, masked, ..module.ctx(rows) };
        let outputs = if self.batch.backward {
            let (outputs, tape) = module.forward(inputs, &ctx, keep)?;
            self.held.entry((stage, microbatch)).or_default().tape = Some(tape);
            self.open += 1;
            self.made.peak = self.made.peak.max(self.open);
            outputs
        } else {
            let inputs = inputs.into_iter().map(|input| input.value).collect();
            module.evaluate(inputs, &ctx)?.into_iter().map(Activation::constant).collect::<Result<_>>()?
        };
        if let (Some(place), Some(loss)) = (module.loss_output(), self.runtime.info.graph.loss) {
            // Here, where the other ranks learn of it.
            parts(&outputs[place].value, loss.reduction)?;
            self.held.entry((stage, microbatch)).or_default().loss = Some(outputs[place].value.clone());
        }
        self.pass_on(def, microbatch, outputs)
    }

    /// Puts the outputs of a stage where they are used.
    fn pass_on(&mut self, def: &StageDef, microbatch: usize, outputs: Vec<Activation>) -> Result<()> {
        let me = self.runtime.group.rank();
        for (output, activation) in def.outputs.iter().zip(outputs) {
            if self.runtime.results.contains(&output.value) {
                // What the caller gets stays as it is when an optimiser changes a parameter that was passed on.
                let result = aliases(&activation.value, &self.runtime.parameters)?;
                self.made.results[microbatch].insert(output.value, result);
            }
            for (rank, stages) in self.runtime.by_rank(&output.consumers) {
                if rank == me {
                    for stage in stages {
                        let held = self.held.entry((stage, microbatch)).or_default();
                        held.values.insert(output.value, activation.clone());
                    }
                } else {
                    let message = Message { flow: Flow::Activation, from: def.index, to: stages[0], microbatch };
                    self.outgoing.entry(self.first_of(message)).or_default().push(Post::pack(&activation));
                }
            }
        }
        Ok(())
    }

    /// The message that carries what `message` would: that to the first stage of its rank which takes values.
    fn first_of(&self, message: Message) -> Message {
        let consumers = self.program.edges().consumers(message.from).iter().copied();
        let rank = self.runtime.rank_of(message.to);
        let to = consumers.into_iter().find(|&to| self.runtime.rank_of(to) == rank).unwrap_or(message.to);
        Message { to, ..message }
    }

    fn backward(&mut self, Compute { stage, pass, microbatch }: Compute) -> Result<()> {
        let module = self.runtime.stage(stage)?;
        let def = module.def();
        let held = self.held.entry((stage, microbatch)).or_default();
        let (found, loss) = (std::mem::take(&mut held.gradients), held.loss.take());
        let tape = held.tape.take().ok_or_else(|| Error::Schedule("a backward pass without a forward pass".into()))?;
        let mut gradients = Vec::with_capacity(def.outputs.len());
        for (place, output) in def.outputs.iter().enumerate() {
            // In the order of the stages, whenever they came.
            let mut sum = Gradient::sum(found.get(&output.value).into_iter().flat_map(BTreeMap::values))?;
            if let Some(loss) = loss.as_ref().filter(|_| module.loss_output() == Some(place)) {
                sum = Gradient::sum([&sum, &Gradient::of_loss(loss, self.batch.weights[microbatch])?])?;
            }
            gradients.push(sum);
        }
        let (backward, weights) = match pass {
            Pass::Input => tape.backward_inputs(&gradients).map(|(backward, weights)| (backward, Some(weights)))?,
            _ => (tape.backward(&gradients)?, None),
        };
        self.open -= usize::from(weights.is_none());
        self.held.entry((stage, microbatch)).or_default().weights = weights;
        self.made.grads.extend(backward.parameters)?;
        for (input, gradient) in def.inputs.iter().zip(backward.inputs) {
            let Some(from) = input.from else { continue };
            if self.runtime.rank_of(from) == self.runtime.group.rank() {
                let held = self.held.entry((from, microbatch)).or_default();
                held.gradients.entry(input.value).or_default().insert(stage, gradient);
            } else {
                let message = Message { flow: Flow::Gradient, from: stage, to: from, microbatch };
                self.outgoing.entry(message).or_default().push(Post::pack_gradient(gradient));
            }
        }
        Ok(())
    }

    fn weight(&mut self, Compute { stage, microbatch, .. }: Compute) -> Result<()> {
        let weights = self.held.get_mut(&(stage, microbatch)).and_then(|held| held.weights.take());
        let weights = weights.ok_or_else(|| Error::Schedule("weight gradients without input gradients".into()))?;
        self.open -= 1;
        Ok(self.made.grads.extend(weights.backward()?)?)
    }

    fn send(&mut self, message: Message) -> Result<()> {
        let nothing = || Error::Schedule("there is nothing to send".into());
        let values = self.outgoing.remove(&message).ok_or_else(nothing)?;
        let values = values.iter().map(|value| aliases(value, &self.runtime.parameters)).collect::<Result<Vec<_>>>()?;
        self.post.send(self.runtime.rank_of(message.to), message, &values)
    }

    /// Waits for what a computation takes from other ranks.
    fn fetch(&mut self, Compute { stage, pass, microbatch }: Compute) -> Result<()> {
        let (def, me) = (self.runtime.stage(stage)?.def(), self.runtime.group.rank());
        let at = (stage, microbatch);
        match pass {
            Pass::Forward => {
                let froms =
                    def.inputs.iter().filter_map(|input| Some((input.value, self.runtime.rank_of(input.from?))));
                for (value, rank) in froms.filter(|&(_, rank)| rank != me) {
                    while !self.held.get(&at).is_some_and(|held| held.values.contains_key(&value)) {
                        self.next_from(rank)?;
                    }
                }
            }
            Pass::Backward | Pass::Input => {
                let pairs = def.outputs.iter().flat_map(|output| output.consumers.iter().map(|&to| (output.value, to)));
                for (value, to) in pairs.filter(|&(_, to)| self.runtime.rank_of(to) != me) {
                    let has = |held: &Held| held.gradients.get(&value).is_some_and(|found| found.contains_key(&to));
                    while !self.held.get(&at).is_some_and(has) {
                        self.next_from(self.runtime.rank_of(to))?;
                    }
                }
            }
            Pass::Weight => {}
        }
        Ok(())
    }

    /// Takes the next message of a rank.
    fn next_from(&mut self, rank: usize) -> Result<()> {
        let nothing = || Error::Schedule(format!("nothing more is to come from rank {rank}"));
        let message = self.awaited.get_mut(&rank).and_then(VecDeque::pop_front).ok_or_else(nothing)?;
        self.receive(message)
    }

    fn receive(&mut self, message: Message) -> Result<()> {
        let Message { flow, from, to, microbatch } = message;
        let values = self.post.receive(self.runtime.rank_of(from), message)?;
        let wanted: Vec<(ValueId, Vec<usize>)> = match flow {
            Flow::Activation => {
                let me = self.runtime.group.rank();
                let outputs = self.runtime.info.stage(from)?.outputs.iter();
                let here = |stages: &[usize]| {
                    stages.iter().copied().filter(|&stage| self.runtime.rank_of(stage) == me).collect_vec()
                };
                outputs
                    .map(|output| (output.value, here(&output.consumers)))
                    .filter(|(_, here)| !here.is_empty())
                    .collect()
            }
            Flow::Gradient => {
                let inputs = self.runtime.info.stage(from)?.inputs.iter().filter(|input| input.from == Some(to));
                inputs.map(|input| (input.value, vec![to])).collect()
            }
        };
        if values.len() != wanted.len() {
            return Err(Error::Schedule(format!("{} values came, {} were expected", values.len(), wanted.len())));
        }
        for ((value, stages), packed) in wanted.into_iter().zip(values) {
            for stage in stages {
                let held = self.held.entry((stage, microbatch)).or_default();
                match flow {
                    Flow::Activation => _ = held.values.insert(value, Post::unpack(&packed)?),
                    Flow::Gradient => {
                        held.gradients.entry(value).or_default().insert(from, Post::unpack_gradient(&packed)?);
                    }
                }
            }
        }
        Ok(())
    }
}
