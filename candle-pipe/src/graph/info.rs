//! A cut model as plain data, and as a listing.
use super::{Edge, Graph, In, LossReduction, NodeKind, Share, ShareGroup, StageDef, ValueId, stages};
use crate::{Error, Result};
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::fmt;

/// All data of a [`Pipe`](crate::Pipe) except its computations, for tools and for other ranks.
///
/// `Display` prints a listing of the stages, their nodes and the values between them.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct PipeInfo {
    /// The model.
    pub graph: Graph,
    /// Its stages.
    pub stages: Vec<StageDef>,
    /// The values that are sent between stages, each with all stages that use it.
    pub edges: Vec<Edge>,
    /// The parameters that several stages use.
    pub shares: Vec<ShareGroup>,
}

impl PipeInfo {
    /// Cuts a graph before the nodes `cuts`.
    ///
    /// # Errors
    /// Those of [`Graph::stages`].
    pub fn new(graph: Graph, cuts: &[usize]) -> Result<Self> {
        let stages = graph.stages(cuts)?;
        let (edges, shares) = (stages::edges(&stages), graph.shares(&stages));
        Ok(Self { graph, stages, edges, shares })
    }

    /// Returns the number of stages.
    pub fn num_stages(&self) -> usize {
        self.stages.len()
    }

    /// Returns a stage.
    ///
    /// # Errors
    /// [`Error::Pipe`] if there is no such stage.
    pub fn stage(&self, index: usize) -> Result<&StageDef> {
        let outside = || Error::Pipe(format!("no stage {index}: the model has {}", self.num_stages()));
        self.stages.get(index).ok_or_else(outside)
    }

    /// Returns the values that skip a stage or that several stages use.
    pub fn skip_edges(&self) -> impl Iterator<Item = &Edge> {
        self.edges.iter().filter(|edge| edge.is_skip())
    }

    /// Returns the shared parameters and modules that are copied to every stage that uses them.
    pub(crate) fn replicated(&self) -> impl Iterator<Item = &ShareGroup> {
        self.shares.iter().filter(|share| share.share == Share::Replicate)
    }

    /// Returns the stage that outputs the loss.
    pub fn loss_stage(&self) -> Option<usize> {
        let loss = self.graph.loss?.value;
        self.stages.iter().position(|stage| stage.outputs.iter().any(|output| output.value == loss))
    }

    fn names(&self, values: impl IntoIterator<Item = ValueId>) -> String {
        values.into_iter().map(|value| self.graph.value_name(value)).join(", ")
    }
}

impl fmt::Display for PipeInfo {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let input = |input: &super::Input| {
            let kind = match input.kind {
                In::Arg => "",
                In::Kwarg => "*",
                In::Args => "..",
            };
            format!("{kind}{}{}", input.name, if input.optional { "?" } else { "" })
        };
        let inputs = self.graph.inputs.iter().map(input).format(", ");
        writeln!(f, "pipe({inputs}): {} stages of {} nodes", self.stages.len(), self.graph.nodes.len())?;
        for stage in &self.stages {
            writeln!(f, "stage {}", stage.index)?;
            for input in &stage.inputs {
                let from = input.from.map_or("the caller".into(), |stage| format!("stage {stage}"));
                writeln!(f, "  {} <- {from}", self.graph.value_name(input.value))?;
            }
            for node in stage.nodes.iter().filter_map(|&node| self.graph.nodes.get(node)) {
                let kind = match node.kind {
                    NodeKind::Module => "",
                    NodeKind::Function => " (function)",
                    NodeKind::Parameter(Share::Transmit) => " (parameter)",
                    NodeKind::Parameter(Share::Replicate) => " (replicated parameter)",
                    NodeKind::Shared => " (shared module)",
                };
                let weight = node.weight.map_or(String::new(), |elements| format!(", {elements} elements"));
                writeln!(f, "  {}({}){kind}{weight}", node.name, self.names(node.inputs.iter().copied()))?;
            }
            for output in stage.outputs.iter().filter(|output| !output.consumers.is_empty()) {
                let (name, consumers) =
                    (self.graph.value_name(output.value), output.consumers.iter().format(", "));
                writeln!(f, "  {name} -> stage {consumers}")?;
            }
        }
        for output in &self.graph.outputs {
            writeln!(f, "output {} = {}", output.name, self.graph.value_name(output.value))?;
        }
        if let Some(loss) = self.graph.loss {
            let reduction = match loss.reduction {
                LossReduction::Mean => "mean over rows",
                LossReduction::Sum => "sum",
                LossReduction::Counted => "sum over count",
            };
            writeln!(f, "loss = {} ({reduction})", self.graph.value_name(loss.value))?;
        }
        Ok(())
    }
}
