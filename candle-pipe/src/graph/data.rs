//! A model as plain data: named nodes, the values between them, and where it is to be cut.
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt;

/// A value of a [`Graph`]: made once, by an input or a node, and used by any nodes after it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(transparent)]
pub struct ValueId(pub usize);

impl fmt::Display for ValueId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "%{}", self.0)
    }
}

/// How a caller gives an input.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum In {
    /// By place among the other such inputs, in the order of declaration, or by name.
    Arg,
    /// By name only.
    Kwarg,
}

/// An input of the model, which any stage may use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Input {
    /// Its name.
    pub name: String,
    /// How it is given.
    pub kind: In,
    /// Whether it has a default.
    pub optional: bool,
    /// The value that it makes.
    pub value: ValueId,
}

/// Where a parameter that several nodes use lives when those are in different stages.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Share {
    /// In the stage where it is declared, which sends it like any value and gets its gradients like those of any value.
    Transmit,
    /// In every stage that uses it, under one name; the gradients of all are summed once.
    Replicate,
}

/// What a node is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum NodeKind {
    /// A layer with parameters of its own.
    Module,
    /// A function of its inputs.
    Function,
    /// A parameter by itself.
    Parameter(Share),
    /// A module that several nodes compute with, built in every stage that has one of them, its gradients summed once.
    Shared,
}

/// A node: a step of the model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Node {
    /// Its full name, which for a module is the prefix of its parameters' names.
    pub name: String,
    /// What it is.
    pub kind: NodeKind,
    /// What it takes.
    pub inputs: Vec<ValueId>,
    /// What it makes.
    pub outputs: Vec<ValueId>,
    /// The number of elements of its parameters, where that was [measured](crate::PipeBuilder::measure).
    pub weight: Option<usize>,
}

impl Node {
    /// Whether every stage that uses the node has its own copy, so that it stands at no place of its own.
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

/// How the losses of microbatches make the loss of the batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reduction {
    /// Each is a mean over its rows: they are weighted by rows, so that uneven microbatches are exact.
    Mean,
    /// Each is a sum: they are added up.
    Sum,
    /// Each is a sum with the count of what it adds up, such as the losses of all valid tokens and their number: the loss of
    /// the batch is the sum of the sums divided by the sum of the counts, over all microbatches and replicas.
    Counted,
}

/// What is differentiated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Loss {
    /// A scalar of floats; for [`Reduction::Counted`] a tuple of one and a count.
    pub value: ValueId,
    /// How several make one.
    pub reduction: Reduction,
}

/// A model as plain data, without what its nodes compute: what can be listed, saved, checked and cut.
///
/// Made by a [`PipeBuilder`](crate::PipeBuilder), or by hand or from JSON, which [`check`](Self::check) is for.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Graph {
    /// The inputs.
    pub inputs: Vec<Input>,
    /// The nodes in the order in which they run.
    pub nodes: Vec<Node>,
    /// The results.
    pub outputs: Vec<Output>,
    /// The loss, in a model to train.
    pub loss: Option<Loss>,
    /// The nodes that cuts were declared before.
    pub splits: Vec<usize>,
}

impl Graph {
    /// The name of a value for messages: its input's, or its node's with its place where there are several.
    pub fn value_name(&self, value: ValueId) -> String {
        if let Some(input) = self.inputs.iter().find(|input| input.value == value) {
            return input.name.clone();
        }
        let place =
            |node: &Node| Some((node.name.clone(), node.outputs.len(), node.outputs.iter().position(|&v| v == value)?));
        match self.nodes.iter().find_map(place) {
            Some((name, 1, _)) => name,
            Some((name, _, place)) => format!("{name}[{place}]"),
            None => value.to_string(),
        }
    }

    /// The values that nodes make of `inputs`, directly or not.
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

    /// The nodes with a place of their own: all but replicated parameters and shared modules.
    pub(super) fn placed(&self) -> impl Iterator<Item = usize> + '_ {
        (0..self.nodes.len()).filter(|&node| !self.nodes[node].is_replicated())
    }
}
