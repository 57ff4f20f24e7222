//! One rank's execution of a program: its state between actions, and the effect of each action.
use super::Runtime;
use super::apart::apart;
use super::batch::StepBatch;
use super::notes::Notes;
use super::reduce::GradReductions;
use super::stopwatch::{Moment, Stopwatch};
use super::traffic::{Traffic, aliases};
use crate::graph::{Ctx, StageDef, ValueId};
use crate::schedule::{Action, Compute, Flow, Message, Pass, Program, Span};
use crate::tape::{Activation, Gradient, StageModule, Tape, WeightTape, parts, vjp};
use crate::{Error, Kwargs, Result, StepOptions, Value, grads};
use candle_core::Tensor;
use candle_core::backprop::GradStore;
use candle_dist::{TensorTree, panic_message};
use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A stage and a microbatch.
type StageMicrobatch = (usize, usize);

/// The state between the passes of a microbatch on a stage.
#[derive(Default)]
struct MicrobatchState {
    /// The input values of the stage that are available.
    values: HashMap<ValueId, Activation>,
    /// The gradients of the stage's outputs, by the stages that computed them.
    gradients: HashMap<ValueId, BTreeMap<usize, Gradient>>,
    loss: Option<Value>,
    tape: Option<Tape>,
    weights: Option<WeightTape>,
}

/// The results of a rank's program.
#[derive(Default)]
pub(super) struct ProgramResults {
    /// The loss of each microbatch, if this rank has it.
    pub(super) losses: Vec<Option<Value>>,
    /// The outputs of each microbatch, by name, if they are kept.
    pub(super) outputs: Vec<Kwargs>,
    pub(super) grads: GradStore,
    pub(super) spans: Vec<Span>,
    /// The peak number of outstanding backward passes, counted per stage and microbatch.
    pub(super) peak: usize,
    /// The longest chain of dependent computations, here or on other ranks, up to the last one here.
    pub(super) path: usize,
    /// The number of weight gradients that could not be deferred to their own pass.
    pub(super) at_once: usize,
}

/// The destination of the outputs of each microbatch.
pub(super) enum Outputs<'a> {
    /// The caller, at the end.
    Kept,
    /// They are dropped.
    Dropped,
    /// A function, as soon as a microbatch is finished.
    Given(&'a mut dyn FnMut(usize, Kwargs) -> Result<()>),
}

impl Outputs<'_> {
    /// Returns the destination that options ask for.
    pub(super) fn of(options: &StepOptions) -> Self {
        if options.outputs { Self::Kept } else { Self::Dropped }
    }
}

/// An execution of a program.
pub(super) struct Execution<'a, 'f> {
    runtime: &'a Runtime,
    program: &'a Program,
    batch: &'a StepBatch<'a>,
    traffic: Traffic<'a>,
    reductions: GradReductions<'a>,
    outputs: Outputs<'f>,
    /// For each microbatch the number of stages on this rank whose outputs are missing.
    missing: Vec<usize>,
    held: HashMap<StageMicrobatch, MicrobatchState>,
    /// The gradients of tracked inputs of the model, by microbatch, value and stage.
    of_inputs: BTreeMap<usize, BTreeMap<ValueId, BTreeMap<usize, Gradient>>>,
    /// The sums of the gradients of each stage, in a process alone.
    of_stages: BTreeMap<usize, GradStore>,
    made: ProgramResults,
    /// The number of outstanding backward passes.
    open: usize,
    stopwatch: Stopwatch,
    /// The start and end times of computations.
    moments: Vec<(Compute, [Moment; 2])>,
}

impl<'a, 'f> Execution<'a, 'f> {
    pub(super) fn new(
        runtime: &'a Runtime,
        program: &'a Program,
        batch: &'a StepBatch<'a>,
        outputs: Outputs<'f>,
        notes: &Notes,
    ) -> Result<Self> {
        let makes =
            |stage: &&StageModule| stage.def().outputs.iter().any(|o| runtime.outputs.contains_key(&o.value));
        let makers = runtime.stages().filter(makes).count();
        Ok(Self {
            runtime,
            program,
            batch,
            traffic: Traffic::new(runtime, program, notes, !batch.backward),
            reductions: GradReductions::new(runtime),
            outputs,
            missing: vec![makers; batch.len()],
            held: HashMap::new(),
            of_inputs: BTreeMap::new(),
            of_stages: BTreeMap::new(),
            made: ProgramResults {
                losses: vec![None; batch.len()],
                outputs: vec![Kwargs::new(); batch.len()],
                ..ProgramResults::default()
            },
            open: 0,
            stopwatch: Stopwatch::new(runtime.clock, &runtime.device)?,
            moments: Vec::new(),
        })
    }

    /// Runs all actions of this rank, but those of microbatches that the batch is too small for. They are the same on all
    /// ranks, so what is left is in one common order.
    pub(super) fn run(mut self) -> Result<ProgramResults> {
        let rank = self.runtime.group.rank();
        let made =
            |action: &Action| action.microbatch().is_none_or(|microbatch| microbatch < self.batch.len());
        let actions: Vec<Action> = apart(&self.program.ranks()[rank]).into_iter().filter(made).collect();
        for action in &actions {
            let span = tracing::debug_span!("stage", %action);
            let done = catch_unwind(AssertUnwindSafe(|| span.in_scope(|| self.act(action))));
            let done = done
                .unwrap_or_else(|panic| Err(Error::Pipe(format!("panicked: {}", panic_message(&*panic)))));
            if let Err(error) = done {
                let error = error.in_action(self.runtime.group.ranks()[rank], action);
                // The other ranks wait for messages that will not come.
                self.runtime.group.fail(&error.to_string());
                return Err(error);
            }
        }
        self.finish().inspect_err(|error| self.runtime.group.fail(&error.to_string()))?;
        Ok(self.made)
    }

    /// Checks that no work is left, and receives the remaining acknowledgements.
    fn finish(&mut self) -> Result<()> {
        let left = self.held.values().any(|held| held.tape.is_some() || held.weights.is_some());
        if left || self.traffic.is_left() {
            let rank = self.runtime.group.ranks()[self.runtime.group.rank()];
            return Err(Error::Schedule(format!("the program of rank {rank} ends with work left over")));
        }
        self.reductions.check(&self.made.grads)?;
        self.add_up()?;
        let seconds =
            |moment: &Moment| Ok::<_, Error>((self.stopwatch.time(moment)? - self.batch.began) as f64 / 1e9);
        for (compute, [start, end]) in &self.moments {
            let (start, end) = (seconds(start)?, seconds(end)?);
            self.made.spans.push(Span { action: Action::Compute(*compute), start, end });
        }
        self.traffic.end()
    }

    /// Adds up what a process alone has apart: the gradients of the variables that the inputs of the model
    /// were computed from, and those of the stages.
    fn add_up(&mut self) -> Result<()> {
        for (microbatch, inputs) in std::mem::take(&mut self.of_inputs) {
            let mut seeds: Vec<(Tensor, Tensor)> = Vec::new();
            for (value, found) in inputs {
                let parts = Gradient::sum(found.values())?.0;
                let tensors = self.batch.input(microbatch, value)?.flatten_tensors();
                seeds.extend(
                    tensors.into_iter().zip(parts).filter_map(|(tensor, part)| Some((tensor, part?))),
                );
            }
            grads::add(&mut self.made.grads, &vjp(&seeds)?)?;
        }
        let mut of_stages = std::mem::take(&mut self.of_stages).into_values();
        of_stages.try_for_each(|grads| grads::add(&mut self.made.grads, &grads))
    }

    /// Returns where the gradients of a stage are summed. A process alone, which others are compared with,
    /// adds up the stages that share a parameter in their order, as ranks do, whatever the order of the
    /// passes.
    fn sums(&mut self, stage: usize) -> &mut GradStore {
        if self.runtime.is_alone() { self.of_stages.entry(stage).or_default() } else { &mut self.made.grads }
    }

    fn act(&mut self, action: &Action) -> Result<()> {
        match *action {
            Action::Compute(compute) => self.timed(compute),
            Action::Overlap(pair) => pair.into_iter().try_for_each(|compute| self.timed(compute)),
            Action::Send(message) => self.traffic.send(message, self.made.path),
            Action::Recv(message) => {
                self.traffic.expect(message);
                Ok(())
            }
            // The sent tensors are owned by the send, so there is nothing to wait for.
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
        let start = self.stopwatch.now()?;
        match compute.pass {
            Pass::Forward => self.forward(compute)?,
            Pass::Backward | Pass::Input => self.backward(compute)?,
            Pass::Weight => self.weight(compute)?,
        }
        self.made.path += 1;
        self.moments.push((compute, [start, self.stopwatch.now()?]));
        Ok(())
    }

    fn forward(&mut self, compute: Compute) -> Result<()> {
        let Compute { stage, microbatch, .. } = compute;
        let module = self.runtime.stage(stage)?;
        let def = module.def();
        let mut values = std::mem::take(&mut self.held.entry((stage, microbatch)).or_default().values);
        let take = |input: &crate::graph::StageInput| match input.from {
            None => self.batch.input(microbatch, input.value).and_then(|input| Activation::of(&input)),
            Some(from) => values.remove(&input.value).ok_or_else(|| {
                Error::Schedule(format!(
                    "{} of stage {from} has not arrived",
                    self.runtime.info.graph.value_name(input.value)
                ))
            }),
        };
        let inputs: Vec<Activation> = def.inputs.iter().map(take).collect::<Result<_>>()?;
        let rows = self.batch.rows[microbatch].clone();
        let (step, training) = (self.batch.options.step, self.batch.training);
        let masked = self.batch.masked[microbatch].clone();
        let ctx = Ctx { microbatch, step, training, masked, ..module.ctx(rows) };
        let outputs = if self.batch.backward {
            let (outputs, tape) = module.forward(inputs, &ctx, self.batch.keep[stage])?;
            self.held.entry((stage, microbatch)).or_default().tape = Some(tape);
            self.open += 1;
            self.made.peak = self.made.peak.max(self.open);
            outputs
        } else {
            self.held.remove(&(stage, microbatch));
            let inputs = inputs.into_iter().map(|input| input.value).collect();
            module.evaluate(inputs, &ctx)?.into_iter().map(Activation::constant).collect::<Result<_>>()?
        };
        if let (Some(place), Some(loss)) = (module.loss_output(), self.runtime.info.graph.loss) {
            // Checked here, where the other ranks learn of an error.
            parts(&outputs[place].value, loss.reduction)?;
            if self.batch.backward {
                self.held.entry((stage, microbatch)).or_default().loss = Some(outputs[place].value.clone());
            }
        }
        self.keep_results(def, microbatch, &outputs)?;
        let values = def.outputs.iter().map(|output| output.value);
        self.pass_on(compute, values.zip(outputs).collect())
    }

    /// Keeps the outputs of a stage that are results of the model, or gives them to the caller.
    fn keep_results(&mut self, def: &StageDef, microbatch: usize, outputs: &[Activation]) -> Result<()> {
        let mut has_results = false;
        for (output, activation) in def.outputs.iter().zip(outputs) {
            let names = self.runtime.outputs.get(&output.value);
            has_results |= names.is_some();
            let is_loss = self.runtime.info.graph.loss.is_some_and(|loss| loss.value == output.value);
            let kept = names.filter(|_| !matches!(self.outputs, Outputs::Dropped));
            if is_loss || kept.is_some() {
                // A result for the caller must not change when an optimizer updates a parameter that was passed on.
                let result = aliases(&activation.value, &self.runtime.parameters)?;
                let named = kept.into_iter().flatten().map(|name| (name.clone(), result.clone()));
                self.made.outputs[microbatch].extend(named);
                if is_loss {
                    self.made.losses[microbatch] = Some(result);
                }
            }
        }
        self.missing[microbatch] -= usize::from(has_results);
        if let Outputs::Given(give) = &mut self.outputs
            && has_results
            && self.missing[microbatch] == 0
        {
            give(microbatch, std::mem::take(&mut self.made.outputs[microbatch]))?;
        }
        Ok(())
    }

    fn backward(&mut self, compute: Compute) -> Result<()> {
        let Compute { stage, pass, microbatch } = compute;
        let module = self.runtime.stage(stage)?;
        let def = module.def();
        let held = self.held.entry((stage, microbatch)).or_default();
        let (found, loss) = (std::mem::take(&mut held.gradients), held.loss.take());
        let tape = held
            .tape
            .take()
            .ok_or_else(|| Error::Schedule("a backward pass without a forward pass".into()))?;
        let mut gradients = Vec::with_capacity(def.outputs.len());
        for (place, output) in def.outputs.iter().enumerate() {
            // In the order of the stages, whatever the order of arrival.
            let mut sum = Gradient::sum(found.get(&output.value).into_iter().flat_map(BTreeMap::values))?;
            if let Some(loss) = loss.as_ref().filter(|_| module.loss_output() == Some(place)) {
                let weight = self.batch.weights[microbatch] * self.batch.share;
                sum =
                    Gradient::sum([&sum, &Gradient::of_loss(loss, weight * self.batch.options.loss_scale)?])?;
            }
            gradients.push(sum);
        }
        let (backward, weights) = match pass {
            Pass::Input => {
                tape.backward_inputs(&gradients).map(|(backward, weights)| (backward, Some(weights)))?
            }
            _ => (tape.backward(&gradients)?, None),
        };
        self.open -= usize::from(weights.is_none());
        self.made.at_once += weights.as_ref().map_or(0, WeightTape::at_once);
        grads::add(self.sums(stage), &backward.parameters)?;
        match weights {
            Some(weights) => self.held.entry((stage, microbatch)).or_default().weights = Some(weights),
            None => _ = self.held.remove(&(stage, microbatch)),
        }
        let inputs = def.inputs.iter().zip(backward.inputs);
        let (of_model, of_stages): (Vec<_>, Vec<_>) = inputs.partition(|(input, _)| input.from.is_none());
        for (input, gradient) in of_model.into_iter().filter(|(_, gradient)| !gradient.is_none()) {
            self.of_inputs
                .entry(microbatch)
                .or_default()
                .entry(input.value)
                .or_default()
                .insert(stage, gradient);
        }
        self.pass_on(compute, of_stages.into_iter().map(|(input, of)| (input.value, packed(of))).collect())
    }

    fn weight(&mut self, Compute { stage, microbatch, .. }: Compute) -> Result<()> {
        let weights = self.held.get_mut(&(stage, microbatch)).and_then(|held| held.weights.take());
        let weights =
            weights.ok_or_else(|| Error::Schedule("weight gradients without input gradients".into()))?;
        self.open -= 1;
        self.held.remove(&(stage, microbatch));
        grads::add(self.sums(stage), &weights.backward()?)
    }

    /// Waits for the inputs of a computation from other ranks.
    fn fetch(&mut self, compute: Compute) -> Result<()> {
        for message in self.program.routes().before(compute) {
            while let Some((next, path, values)) = self.traffic.next_before(message)? {
                self.made.path = self.made.path.max(path);
                self.deliver(next, values)?;
            }
        }
        Ok(())
    }

    /// Passes what a computation has made to other stages: at once to those of this rank, with its messages
    /// to others.
    fn pass_on(&mut self, compute: Compute, made: HashMap<ValueId, Activation>) -> Result<()> {
        let routes = self.program.routes();
        for message in routes.passed(compute) {
            let contents = self.program.contents(message).iter();
            let values: Option<Vec<_>> = contents.map(|(value, _)| made.get(value).cloned()).collect();
            let missing = || Error::Schedule("a value that a message carries was not computed".to_string());
            let values = values.ok_or_else(missing)?;
            if routes.is_local(message) {
                self.deliver(message, values)?;
            } else {
                self.traffic.put(message, values);
            }
        }
        Ok(())
    }

    /// Gives the stages of this rank what came for them.
    fn deliver(&mut self, message: Message, values: Vec<Activation>) -> Result<()> {
        for ((value, stages), came) in self.program.contents(message).iter().zip(values) {
            for &stage in stages {
                let held = self.held.entry((stage, message.microbatch)).or_default();
                match message.flow {
                    Flow::Activation => _ = held.values.insert(*value, came.clone()),
                    Flow::Gradient => {
                        held.gradients
                            .entry(*value)
                            .or_default()
                            .insert(message.from, unpacked(&came.value)?);
                    }
                }
            }
        }
        Ok(())
    }
}

/// Packs the gradient of a value as a list.
fn packed(Gradient(parts): Gradient) -> Activation {
    let parts = parts.into_iter().map(|part| part.map_or(Value::None, Value::Tensor));
    Activation { value: Value::List(parts.collect()), tracked: Vec::new() }
}

fn unpacked(packed: &Value) -> Result<Gradient> {
    let part = |part: &Value| match part {
        Value::Tensor(tensor) => Ok(Some(tensor.clone())),
        Value::None => Ok(None),
        other => Err(Error::Pipe(format!("{other} for a gradient"))),
    };
    Ok(Gradient(packed.items()?.iter().map(part).collect::<Result<_>>()?))
}
