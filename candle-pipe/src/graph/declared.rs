//! A model as plain data: named nodes, the values between them, and the declared cuts.
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// A value of a [`Graph`]: made once, by an input or a node, and used by any later nodes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ValueId(pub usize);

impl fmt::Display for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// How a caller passes an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum In {
    /// By position among such inputs, in the order of declaration, or by name.
    Arg,
    /// By name only.
    Kwarg,
    /// All arguments by position that are left, as a list, or a list by name. A model has one such input at most.
    Args,
}

/// An input of the model, which any stage may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// Its name.
    pub name: String,
    /// How it is passed.
    pub kind: In,
    /// Whether it has a default.
    pub optional: bool,
    /// Its value.
    pub value: ValueId,
}

/// The home of a parameter that nodes in different stages use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Share {
    /// The stage where it is declared. That stage sends it like any value and receives its gradients.
    Transmit,
    /// Every stage that uses it, under one name. The gradients of all are summed once.
    Replicate,
}

/// The kind of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum NodeKind {
    /// A layer with parameters of its own.
    Module,
    /// A function of its inputs.
    Function,
    /// A single parameter.
    Parameter(Share),
    /// A module that several nodes share. It is built in every stage with such a node; its gradients are summed once.
    Shared,
}

/// A node: a step of the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its full name, which for a module is the prefix of its parameters' names.
    pub name: String,
    /// Its kind.
    pub kind: NodeKind,
    /// Its inputs.
    pub inputs: Vec<ValueId>,
    /// Its outputs.
    pub outputs: Vec<ValueId>,
    /// The number of elements of its parameters, if [measured](crate::PipeBuilder::measure).
    pub weight: Option<usize>,
}

impl Node {
    /// Returns whether every stage that uses the node has its own copy. Such a node belongs to no single stage.
    pub fn is_replicated(&self) -> bool {
        matches!(self.kind, NodeKind::Parameter(Share::Replicate) | NodeKind::Shared)
    }
}

/// A result of the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Output {
    /// Its name.
    pub name: String,
    /// The value.
    pub value: ValueId,
}

/// How the losses of microbatches are combined to the loss of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LossReduction {
    /// Each is a mean over its rows. They are weighted by rows, so that uneven microbatches are exact.
    Mean,
    /// Each is a sum. They are summed.
    Sum,
    /// Each is a sum with a count, such as the losses of all valid tokens and their number. The loss of the batch is
    /// the sum of the sums divided by the sum of the counts, over all microbatches and replicas.
    Counted,
}

/// The former name of [`LossReduction`].
#[deprecated(since = "0.1.0", note = "renamed to LossReduction")]
pub type Reduction = LossReduction;

/// The loss of a model.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loss {
    /// A scalar of floats; for [`LossReduction::Counted`] a tuple of such a scalar and a count.
    pub value: ValueId,
    /// How the losses of microbatches are combined.
    pub reduction: LossReduction,
}

/// A model as plain data, without its computations: it can be listed, saved, checked and cut.
///
/// Made by a [`PipeBuilder`](crate::PipeBuilder), by hand, or from JSON; call [`check`](Self::check) in the latter
/// cases.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Graph {
    /// The inputs.
    pub inputs: Vec<Input>,
    /// The nodes in the order in which they run.
    pub nodes: Vec<Node>,
    /// The results.
    pub outputs: Vec<Output>,
    /// The loss, if the model is trained.
    pub loss: Option<Loss>,
    /// The nodes before which cuts were declared.
    pub splits: Vec<usize>,
}

impl Graph {
    /// Returns the name of a value for messages: that of its input, or of its node with an index if there are several.
    pub fn value_name(&self, value: ValueId) -> String {
        if let Some(input) = self.inputs.iter().find(|input| input.value == value) {
            return input.name.clone();
        }
        let place = |node: &Node| {
            Some((node.name.clone(), node.outputs.len(), node.outputs.iter().position(|&v| v == value)?))
        };
        match self.nodes.iter().find_map(place) {
            Some((name, 1, _)) => name,
            Some((name, _, place)) => format!("{name}[{place}]"),
            None => value.to_string(),
        }
    }

    /// Returns the values that depend on `inputs`, directly or not.
    pub(crate) fn made_of(&self, inputs: impl IntoIterator<Item = ValueId>) -> Vec<ValueId> {
        let mut from: BTreeSet<ValueId> = inputs.into_iter().collect();
        let mut made = Vec::new();
        for node in &self.nodes {
            if node.inputs.iter().any(|input| from.contains(input)) {
                from.extend(&node.outputs);
                made.extend(&node.outputs);
            }
        }
        made
    }

    /// Returns the shared module that a node calls, by name, and the number of calls of it by earlier nodes.
    pub(crate) fn call_of(&self, node: &Node) -> Option<(String, usize)> {
        let module = self.nodes.iter().find(|module| {
            module.kind == NodeKind::Shared && module.outputs.iter().any(|value| node.inputs.contains(value))
        })?;
        let calls = |other: &&Node| module.outputs.iter().any(|value| other.inputs.contains(value));
        let number = self.nodes.iter().filter(calls).position(|other| other.name == node.name)?;
        Some((module.name.clone(), number))
    }

    /// Returns the nodes that belong to one stage: all but replicated parameters and shared modules.
    pub(super) fn placed(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.nodes.len()).filter(|&node| !self.nodes[node].is_replicated())
    }
}
