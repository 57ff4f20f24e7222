//! The stages of a cut graph: nodes, inputs and outputs.
use super::{Graph, NodeKind, Share, ValueId};
use crate::{Error, Result};
use serde::{Deserialize, Serialize};
use std::collections::{BTreeMap, BTreeSet};

/// One stage of a model.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageDef {
    /// Its index.
    pub index: usize,
    /// The nodes that it runs, in order. Its copies of replicated parameters come first.
    pub nodes: Vec<usize>,
    /// Its inputs, in order.
    pub inputs: Vec<StageInput>,
    /// Its outputs, in order.
    pub outputs: Vec<StageOutput>,
}

/// An input of a stage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageInput {
    /// The value.
    pub value: ValueId,
    /// The stage that makes it; `None` for an input of the model.
    pub from: Option<usize>,
}

/// An output of a stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct StageOutput {
    /// The value.
    pub value: ValueId,
    /// The later stages that use it, ascending; empty if only the caller uses it.
    pub consumers: Vec<usize>,
}

/// A value that one stage sends to others.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Edge {
    /// The value.
    pub value: ValueId,
    /// The stage that makes it.
    pub from: usize,
    /// All stages that use it, ascending.
    pub to: Vec<usize>,
}

impl Edge {
    /// Returns whether the value skips a stage, or several stages use it.
    pub fn is_skip(&self) -> bool {
        self.to != [self.from + 1]
    }
}

/// A parameter, or a module with its parameters, that several stages use.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ShareGroup {
    /// The full name of the parameter or module.
    pub name: String,
    /// How it is shared.
    pub share: Share,
    /// The stages that use it, ascending; the owner of a transmitted parameter comes first.
    pub stages: Vec<usize>,
}

impl Graph {
    /// Returns the stages of the graph, cut before the nodes `cuts`, ascending.
    ///
    /// A replicated parameter belongs to every stage that uses it, independent of its declaration.
    ///
    /// # Errors
    /// Those of [`check`](Self::check), and [`Error::Pipe`] if a stage would have no node of its own.
    pub fn stages(&self, cuts: &[usize]) -> Result<Vec<StageDef>> {
        self.check()?;
        let stage_of = self.place(cuts)?;
        let mut stages: Vec<StageDef> = (0..=cuts.len())
            .map(|index| StageDef { index, nodes: Vec::new(), inputs: Vec::new(), outputs: Vec::new() })
            .collect();
        let users = self.users(&stage_of);
        for (node, stage) in stage_of.iter().enumerate() {
            match stage {
                Some(stage) => stages[*stage].nodes.push(node),
                None => {
                    for &stage in
                        self.nodes[node].outputs.iter().filter_map(|value| users.get(value)).flatten()
                    {
                        stages[stage].nodes.push(node);
                    }
                }
            }
        }
        for stage in &mut stages {
            stage.nodes.sort_by_key(|&node| (stage_of[node].is_some(), node));
        }
        for input in &self.inputs {
            for &stage in users.get(&input.value).into_iter().flatten() {
                stages[stage].inputs.push(StageInput { value: input.value, from: None });
            }
        }
        let results: BTreeSet<ValueId> =
            self.outputs.iter().map(|output| output.value).chain(self.loss.map(|loss| loss.value)).collect();
        for (node, from) in self.nodes.iter().zip(&stage_of) {
            let Some(from) = *from else { continue };
            for &value in &node.outputs {
                let all = users.get(&value).into_iter().flatten().copied();
                let consumers: Vec<usize> = all.filter(|&stage| stage != from).collect();
                for &stage in &consumers {
                    stages[stage].inputs.push(StageInput { value, from: Some(from) });
                }
                if !consumers.is_empty() || results.contains(&value) {
                    stages[from].outputs.push(StageOutput { value, consumers });
                }
            }
        }
        Ok(stages)
    }

    /// Returns the parameters that several stages use.
    pub(super) fn shares(&self, stages: &[StageDef]) -> Vec<ShareGroup> {
        let parameter = |(index, node): (usize, &super::Node)| {
            let share = match node.kind {
                NodeKind::Parameter(share) => share,
                NodeKind::Shared => Share::Replicate,
                NodeKind::Module | NodeKind::Function => return None,
            };
            let owners = stages.iter().filter(|stage| stage.nodes.contains(&index)).map(|stage| stage.index);
            let receives =
                |stage: &&StageDef| stage.inputs.iter().any(|input| node.outputs.contains(&input.value));
            let receivers = stages.iter().filter(receives).map(|stage| stage.index);
            let stages: Vec<usize> = owners.chain(receivers).collect();
            (stages.len() > 1).then(|| ShareGroup { name: node.name.clone(), share, stages })
        };
        self.nodes.iter().enumerate().filter_map(parameter).collect()
    }

    /// Returns the stage of every node; `None` for a replicated parameter.
    fn place(&self, cuts: &[usize]) -> Result<Vec<Option<usize>>> {
        if !cuts.is_sorted() {
            return Err(Error::Pipe(format!("cuts {cuts:?} do not ascend")));
        }
        let stage = |node: usize| {
            (!self.nodes[node].is_replicated()).then(|| cuts.partition_point(|&cut| cut <= node))
        };
        let places: Vec<Option<usize>> = (0..self.nodes.len()).map(stage).collect();
        match (0..=cuts.len()).find(|&stage| !places.contains(&Some(stage))) {
            Some(stage) => {
                let nodes = self.placed().count();
                Err(Error::Pipe(format!(
                    "stage {stage} would be empty: {} stages of {nodes} nodes",
                    cuts.len() + 1
                )))
            }
            None => Ok(places),
        }
    }

    /// Returns the stages that use each value, ascending.
    fn users(&self, stage_of: &[Option<usize>]) -> BTreeMap<ValueId, BTreeSet<usize>> {
        let mut users: BTreeMap<ValueId, BTreeSet<usize>> = BTreeMap::new();
        for (node, stage) in self.nodes.iter().zip(stage_of) {
            for &value in &node.inputs {
                users.entry(value).or_default().extend(stage);
            }
        }
        users
    }
}

/// Returns the values that are sent between stages.
pub(super) fn edges(stages: &[StageDef]) -> Vec<Edge> {
    let outputs = stages.iter().flat_map(|stage| stage.outputs.iter().map(|output| (stage.index, output)));
    let edge = |(from, output): (usize, &StageOutput)| Edge {
        value: output.value,
        from,
        to: output.consumers.clone(),
    };
    outputs.map(edge).filter(|edge| !edge.to.is_empty()).collect()
}
