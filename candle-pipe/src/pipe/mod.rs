//! A model cut into stages.
//!
#![doc = include_str!("README.md")]

mod build;
mod builder;
mod loss;
mod pick;

pub use builder::{Layer, PipeBuilder, PipeModule, SharedModule};
pub use loss::LossSpec;
pub(crate) use loss::NAME as LOSS;

use crate::graph::{
    Edge, Graph, GraphSignature, Inputs, NamedTensors, PipeInfo, Scope, ShareGroup, SplitSpec, StageDef,
    ValueId,
};
use crate::tape::{StageModule, StageNode};
use crate::{Kwargs, Result, Value};
use build::{BuildContext, NodeBuilder, build};
use candle_core::{Device, Tensor};
use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};

/// A model cut into stages. Each rank builds its own stages.
///
/// It holds no parameters; [`build_stage`](Self::build_stage) creates them. `Display` prints a listing.
pub struct Pipe<B> {
    info: PipeInfo,
    recipes: Vec<NodeBuilder<B>>,
    signature: GraphSignature,
    /// The first stage that requested each variable that is not declared as shared.
    owners: Mutex<BTreeMap<String, usize>>,
}

impl<B: Scope> Pipe<B> {
    fn new(
        graph: Graph,
        recipes: Vec<NodeBuilder<B>>,
        defaults: BTreeMap<ValueId, Value>,
        split: &SplitSpec,
    ) -> Result<Self> {
        graph.check()?;
        let cuts = split.cuts(&graph)?;
        let signature = GraphSignature::new(&graph.inputs, defaults);
        Ok(Self { info: PipeInfo::new(graph, &cuts)?, recipes, signature, owners: Mutex::default() })
    }

    /// Returns the model and its stages as plain data.
    pub fn info(&self) -> &PipeInfo {
        &self.info
    }

    /// Returns the number of stages.
    pub fn num_stages(&self) -> usize {
        self.info.num_stages()
    }

    /// Returns the definition of a stage: its nodes, inputs and outputs.
    ///
    /// # Errors
    /// [`Error::Pipe`](crate::Error::Pipe) if there is no such stage.
    pub fn stage(&self, index: usize) -> Result<&StageDef> {
        self.info.stage(index)
    }

    /// Returns the values that are sent between stages, each with all stages that use it.
    pub fn edges(&self) -> &[Edge] {
        &self.info.edges
    }

    /// Returns the parameters that several stages use.
    pub fn shares(&self) -> &[ShareGroup] {
        &self.info.shares
    }

    /// Returns the values of the model's inputs: `args` by position, `kwargs` by name, the others by default.
    ///
    /// # Errors
    /// [`Error::Pipe`](crate::Error::Pipe) that names an input that is missing, unknown or passed twice.
    pub fn bind(&self, args: &[Value], kwargs: &Kwargs) -> Result<Inputs> {
        self.signature.bind(args, kwargs)
    }

    pub(crate) fn signature(&self) -> &GraphSignature {
        &self.signature
    }

    /// Builds one stage on `device`; no node of another stage is built.
    ///
    /// Logs a warning if the stage requests a variable that another stage of this pipe requested in this process, and
    /// that is not declared as shared: each stage has a part of its gradient. A [`Runtime`](crate::Runtime) sums them.
    ///
    /// # Errors
    /// If there is no such stage, or a constructor fails.
    pub fn build_stage(&self, index: usize, scope: &B, device: &Device) -> Result<StageModule> {
        self.stage(index)?;
        self.build(&[index], scope, device).map(|mut stages| stages.swap_remove(0))
    }

    /// Builds several stages on one device. They share one copy of replicated parameters.
    ///
    /// # Errors
    /// If there is no such stage, or a constructor fails.
    pub(crate) fn build_stages(
        &self,
        indices: impl IntoIterator<Item = usize>,
        scope: &B,
        device: &Device,
    ) -> Result<Vec<StageModule>> {
        let indices = Vec::from_iter(indices);
        indices.iter().try_for_each(|&index| self.stage(index).map(drop))?;
        self.build(&indices, scope, device)
    }

    fn build(&self, indices: &[usize], scope: &B, device: &Device) -> Result<Vec<StageModule>> {
        let scope = scope.on(device)?;
        let (mut replicated, workshop) = (BTreeMap::new(), BuildContext::default());
        let stage = |&index: &usize| {
            let def = self.stage(index)?;
            let mut parameters: BTreeMap<String, Tensor> = BTreeMap::new();
            let (mut nodes, mut copies) = (Vec::new(), BTreeMap::new());
            let loss = self.info.graph.loss.map(|loss| loss.value);
            for &number in &def.nodes {
                let node = &self.info.graph.nodes[number];
                let make = || build(node, &self.recipes[number], &scope, &workshop);
                let (op, named) = match replicated.get(&number) {
                    Some(made) => Clone::clone(made),
                    None if node.is_replicated() => replicated.entry(number).or_insert(make()?).clone(),
                    None => make()?,
                };
                if node.is_replicated() {
                    copies.insert(node.name.clone(), named.clone());
                }
                parameters.extend(named);
                nodes.push(StageNode::new(&self.info.graph, node, op));
            }
            self.warn_of_shares(index, parameters.iter().filter(|(name, _)| !is_copy(&copies, name)));
            Ok(StageModule::new(def.clone(), nodes, parameters, copies, loss, &scope, device.clone()))
        };
        indices.iter().map(stage).collect()
    }

    /// Logs which of a stage's own parameters other stages requested too.
    fn warn_of_shares<'a>(&self, stage: usize, own: impl Iterator<Item = (&'a String, &'a Tensor)>) {
        let mut owners = self.owners.lock().unwrap_or_else(PoisonError::into_inner);
        for (name, _) in own.filter(|(_, tensor)| tensor.track_op()) {
            let other = *owners.entry(name.clone()).or_insert(stage);
            if other != stage {
                candle_dist::warn(format_args!(
                    "stages {other} and {stage} share the parameter {name:?} undeclared: each has a part of its gradient, which a \
                     LocalPipe or a Runtime adds up; declare it with PipeBuilder::parameter or shared_module"
                ));
            }
        }
    }
}

fn is_copy(copies: &BTreeMap<String, NamedTensors>, name: &str) -> bool {
    copies.values().flatten().any(|(copy, _)| copy == name)
}

impl<B> fmt::Display for Pipe<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.info.fmt(f)
    }
}

impl<B> fmt::Debug for Pipe<B> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Pipe").field(&self.info).finish()
    }
}
