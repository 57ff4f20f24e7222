//! A built stage.
use super::activation::detached;
use super::record::{FirstRun, RunGraph};
use super::state::{StageState, watched};
use super::{Activation, Fingerprints, Tape};
use crate::graph::{Ctx, Graph, NamedTensors, Node, Scope, StageDef, StageOp, ValueId, variables};
use crate::{Error, Result, Value, ValuePath};
use candle_core::{DType, Device, Tensor, Var};
use candle_dist::{DeviceMesh, ProcessGroup, TensorTree};
use candle_dist_kernels::random::Draws;
use itertools::Itertools;
use std::cell::RefCell;
use std::collections::{BTreeMap, HashMap};
use std::ops::Range;
use std::rc::Rc;
use std::time::Instant;

/// The data of a forward pass that a stage keeps for the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum Keep {
    /// All activations.
    #[default]
    Activations,
    /// The stage's inputs, from which the backward pass recomputes the rest (Chen et al. 2016).
    ///
    /// The outputs of the two passes are compared, bit by bit. A stage that draws other random numbers the second time, as
    /// `candle_nn::Dropout` does, is an error. [`nn::Dropout`](crate::nn::Dropout) draws the same numbers. On a CPU a
    /// digest of the outputs is kept, elsewhere the outputs.
    ///
    /// Variables of the stage that a forward pass changes, such as the statistics of a batch norm, change once: the second
    /// pass finds them as the first did, and leaves them as they are. A pass that is the first to change a variable keeps
    /// all its activations. This is about variables that the stage asked its scope for. If the forward pass changes others,
    /// or fields of modules, or trained or very large weights in the middle of a step, use [`Activations`](Self::Activations).
    Inputs,
    /// Like [`Inputs`](Self::Inputs), without the comparison: for kernels that are not deterministic.
    ///
    /// If the recomputed pass differs, the gradients are those of the recomputed pass.
    InputsUnchecked,
}

/// A stage with its parameters, on its device.
///
/// It knows nothing of the other stages; its [`StageDef`] lists its inputs and outputs.
#[derive(Clone)]
pub struct StageModule(Rc<StageInner>);

struct StageInner {
    def: StageDef,
    nodes: Vec<StageNode>,
    parameters: BTreeMap<String, Tensor>,
    /// The variables that the parameters are, or are made of.
    variables: BTreeMap<String, Tensor>,
    /// The parameters of replicated parameters and shared modules, by their names in the model.
    copies: BTreeMap<String, NamedTensors>,
    loss: Option<ValueId>,
    /// For each node, the values that neither a later node nor the caller uses.
    unused_after: Vec<Vec<ValueId>>,
    state: RefCell<StageState>,
    device: Device,
    dtype: DType,
    mesh: Option<DeviceMesh>,
}

/// A built node.
pub(crate) struct StageNode {
    name: String,
    op: Rc<dyn StageOp>,
    inputs: Vec<ValueId>,
    outputs: Vec<ValueId>,
    makes_loss: bool,
    /// The shared module that it calls, and the number of the call in the model.
    call: Option<(String, usize)>,
}

impl StageNode {
    pub(crate) fn new(graph: &Graph, node: &Node, op: Rc<dyn StageOp>) -> Self {
        let makes_loss = graph.loss.is_some_and(|loss| node.outputs.contains(&loss.value));
        let (name, inputs, outputs) = (node.name.clone(), node.inputs.clone(), node.outputs.clone());
        Self { name, op, inputs, outputs, makes_loss, call: graph.call_of(node) }
    }

    pub(super) fn run(&self, values: &HashMap<ValueId, Value>, ctx: &Ctx) -> Result<Vec<Value>> {
        let inputs =
            self.inputs.iter().map(|id| values.get(id).cloned().unwrap_or(Value::None)).collect_vec();
        match ctx.masked.as_ref().filter(|_| self.makes_loss) {
            None => self.compute(&inputs, ctx),
            Some(masked) => {
                // A loss that includes rows of zeros would be wrong.
                let own = self.inputs.iter().zip(&inputs).map(|(&id, value)| masked.own(id, value));
                let own = own.collect::<Result<Vec<_>>>().map_err(|error| error.at_node(&self.name))?;
                self.compute(&own, &Ctx { rows: masked.rows(), ..ctx.clone() })
            }
        }
    }

    fn compute(&self, inputs: &[Value], ctx: &Ctx) -> Result<Vec<Value>> {
        let (place, call) = match &self.call {
            Some((module, call)) => (module, Some(*call)),
            None => (&self.name, None),
        };
        let outputs = Draws::at(place, call, ctx.rows.clone(), || self.op.forward(inputs, ctx));
        let outputs = outputs.map_err(|error| error.at_node(&self.name))?;
        if outputs.len() == self.outputs.len() {
            return match self.makes_loss {
                true => outputs
                    .iter()
                    .map(whole)
                    .collect::<Result<_>>()
                    .map_err(|error| error.at_node(&self.name)),
                false => Ok(outputs),
            };
        }
        let (made, declared) = (outputs.len(), self.outputs.len());
        Err(Error::Pipe(format!("{made} values instead of the {declared} declared")).at_node(&self.name))
    }
}

/// Converts a loss to a plain tensor, the same on every rank of a mesh.
fn whole(value: &Value) -> Result<Value> {
    value.map_leaves(&ValuePath::new("loss"), &mut |_, leaf| match leaf {
        #[cfg(feature = "shard")]
        Value::DTensor(tensor) => Ok(tensor.full_tensor()?.into()),
        leaf => Ok(leaf.clone()),
    })
}

/// Returns the variables of parameters. A parameter that is not one itself, such as the cast of one, has those that it is
/// made of: by its own name, or numbered if there are several.
fn variables_of<'a>(
    parameters: impl IntoIterator<Item = (&'a String, &'a Tensor)>,
) -> BTreeMap<String, Tensor> {
    let mut found = BTreeMap::new();
    for (name, parameter) in parameters {
        match variables(parameter).collect_vec().as_slice() {
            [variable] => _ = found.insert(name.clone(), (*variable).clone()),
            several => {
                let numbered = several.iter().enumerate();
                found.extend(numbered.map(|(i, variable)| (format!("{name}[{i}]"), (*variable).clone())));
            }
        }
    }
    found
}

/// Returns the variables of stages by full name, each once.
pub(crate) fn named_vars<'a>(
    stages: impl IntoIterator<Item = &'a StageModule>,
) -> Result<Vec<(String, Var)>> {
    let all: BTreeMap<&String, &Tensor> = stages.into_iter().flat_map(StageModule::variables).collect();
    let each = all.into_iter().unique_by(|(_, variable)| variable.id());
    each.map(|(name, variable)| Ok((name.clone(), Var::from_tensor(variable)?))).collect()
}

impl StageModule {
    pub(crate) fn new(
        def: StageDef,
        nodes: Vec<StageNode>,
        parameters: BTreeMap<String, Tensor>,
        copies: BTreeMap<String, NamedTensors>,
        loss: Option<ValueId>,
        scope: &impl Scope,
        device: Device,
    ) -> Self {
        let mut last_use: HashMap<ValueId, usize> = HashMap::new();
        for (i, node) in nodes.iter().enumerate() {
            last_use.extend(node.inputs.iter().chain(&node.outputs).map(|&value| (value, i)));
        }
        def.outputs.iter().for_each(|output| _ = last_use.remove(&output.value));
        let mut unused_after = vec![Vec::new(); nodes.len()];
        last_use.into_iter().for_each(|(value, node)| unused_after[node].push(value));
        let (state, variables) = (RefCell::default(), variables_of(&parameters));
        let (dtype, mesh) = (scope.dtype(), scope.mesh());
        let inner = StageInner {
            def,
            nodes,
            parameters,
            variables,
            copies,
            loss,
            unused_after,
            state,
            device,
            dtype,
            mesh,
        };
        Self(Rc::new(inner))
    }

    /// Returns the ranks that have parts of the stage's tensors, if there are several.
    pub(super) fn ranks(&self) -> Result<Option<&ProcessGroup>> {
        let mesh = self.0.mesh.as_ref().filter(|mesh| mesh.size() > 1);
        Ok(mesh.map(DeviceMesh::group).transpose()?)
    }

    /// Returns the variables that the parameters are, or are made of, by the parameters' full names.
    pub(crate) fn variables(&self) -> &BTreeMap<String, Tensor> {
        &self.0.variables
    }

    pub(super) fn state(&self) -> &RefCell<StageState> {
        &self.0.state
    }

    /// Returns the node that makes a value.
    pub(super) fn maker(&self, value: ValueId) -> Option<&str> {
        self.0.nodes.iter().find(|node| node.outputs.contains(&value)).map(|node| node.name.as_str())
    }

    /// Returns the definition of the stage: its nodes, inputs and outputs.
    pub fn def(&self) -> &StageDef {
        &self.0.def
    }

    /// Returns the parameters that the stage's modules requested, by full name.
    pub fn parameters(&self) -> &BTreeMap<String, Tensor> {
        &self.0.parameters
    }

    /// Returns the variables of this stage's copy of the replicated `name`: those of a declared parameter or module, whose
    /// full names may differ, or the parameter of that name.
    pub(crate) fn copy_of(&self, name: &str) -> BTreeMap<String, Tensor> {
        match self.0.copies.get(name) {
            Some(declared) => variables_of(declared.iter().map(|(name, tensor)| (name, tensor))),
            None => self
                .variables()
                .get_key_value(name)
                .map(|(name, tensor)| (name.clone(), tensor.clone()))
                .into_iter()
                .collect(),
        }
    }

    /// Returns whether the replicated `name` asked its scope for parameters.
    pub(crate) fn asked_for(&self, name: &str) -> bool {
        self.0
            .copies
            .get(name)
            .map_or_else(|| self.parameters().contains_key(name), |declared| !declared.is_empty())
    }

    /// Returns the stage's device.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Returns the index of the loss among the stage's outputs, if it is one of them.
    pub fn loss_output(&self) -> Option<usize> {
        self.def().outputs.iter().position(|output| Some(output.value) == self.0.loss)
    }

    /// Returns the context of a microbatch of these rows, as the first one of the first training step; change fields as
    /// needed.
    pub fn ctx(&self, rows: Range<usize>) -> Ctx {
        let (device, dtype) = (self.0.device.clone(), self.0.dtype);
        Ctx { device, dtype, microbatch: 0, rows, step: 0, training: true, masked: None }
    }

    /// Runs the forward pass on `inputs`, in the order of the [`StageDef`]. Returns the outputs and the tape for a
    /// backward pass.
    ///
    /// Inputs are moved to the stage's device. Those that require gradients are copied: each stage has its own graph.
    ///
    /// # Errors
    /// Those of the nodes, with the node's name.
    pub fn forward(&self, inputs: Vec<Activation>, ctx: &Ctx, keep: Keep) -> Result<(Vec<Activation>, Tape)> {
        let inputs = inputs.into_iter().map(|input| {
            Ok(Activation { value: input.value.to_device(self.device())?, tracked: input.tracked })
        });
        let inputs = inputs.collect::<Result<Vec<_>>>()?;
        let run = || Draws::of(|| RunGraph::new(self, &inputs, ctx));
        let ((recorded, draws), before) = match keep {
            Keep::Activations => (run()?, None),
            Keep::Inputs | Keep::InputsUnchecked => {
                watched(self, ctx, run, |(recorded, _)| recorded.reached())?
            }
        };
        if let (Some(place), Some(loss)) = (self.loss_output(), self.0.loss) {
            let name = self.maker(loss).unwrap_or_default();
            recorded.check_count(place).map_err(|error| error.at_node(name))?;
        }
        let outputs = recorded.outputs()?;
        let tape = match before {
            None => Tape::recorded(self.clone(), recorded),
            Some(before) => {
                let is_checked = keep == Keep::Inputs;
                let outputs = is_checked.then(|| Fingerprints::of(&outputs)).transpose()?;
                Tape::inputs(self.clone(), inputs, ctx.clone(), FirstRun { draws, before, outputs })
            }
        };
        Ok((outputs, tape))
    }

    /// Returns the stage's outputs, without a tape: activations are freed on the way.
    ///
    /// # Errors
    /// Those of the nodes, with the node's name.
    pub fn evaluate(&self, inputs: Vec<Value>, ctx: &Ctx) -> Result<Vec<Value>> {
        self.run(self.here(inputs)?, |node, values| node.run(values, ctx)?.iter().map(detached).collect())
    }

    /// Like [`evaluate`](Self::evaluate); calls `observe` with each node's name, time in seconds and outputs.
    pub(crate) fn observe(
        &self,
        inputs: Vec<Value>,
        ctx: &Ctx,
        mut observe: impl FnMut(&str, f64, &[Value]),
    ) -> Result<Vec<Value>> {
        self.run(self.here(inputs)?, |node, values| {
            self.device().synchronize()?;
            let start = Instant::now();
            let outputs = node.run(values, ctx)?;
            self.device().synchronize()?;
            observe(&node.name, start.elapsed().as_secs_f64(), &outputs);
            outputs.iter().map(detached).collect()
        })
    }

    /// Moves the values to the stage's device.
    fn here(&self, values: Vec<Value>) -> Result<Vec<Value>> {
        values.iter().map(|value| Ok(value.to_device(self.device())?)).collect()
    }

    /// Runs the values through the nodes; `run` runs each node.
    pub(super) fn run(
        &self,
        inputs: Vec<Value>,
        mut run: impl FnMut(&StageNode, &HashMap<ValueId, Value>) -> Result<Vec<Value>>,
    ) -> Result<Vec<Value>> {
        let def = self.def();
        if inputs.len() != def.inputs.len() {
            let (given, takes) = (inputs.len(), def.inputs.len());
            return Err(Error::Pipe(format!("{given} values for stage {}, which takes {takes}", def.index)));
        }
        let mut values: HashMap<ValueId, Value> =
            def.inputs.iter().map(|input| input.value).zip(inputs).collect();
        for (node, unused) in self.0.nodes.iter().zip(&self.0.unused_after) {
            let outputs = run(node, &values)?;
            values.extend(node.outputs.iter().copied().zip(outputs));
            unused.iter().for_each(|value| _ = values.remove(value));
        }
        Ok(def
            .outputs
            .iter()
            .map(|output| values.get(&output.value).cloned().unwrap_or(Value::None))
            .collect())
    }
}
