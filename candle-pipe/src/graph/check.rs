//! Checks of a graph: every value is made once and before its use, and every name is unique.
use super::{Graph, In, Node, NodeKind, ValueId};
use crate::{Error, Result};
use itertools::Itertools;
use std::collections::{BTreeMap, BTreeSet};

impl Graph {
    /// Checks that the graph can run.
    ///
    /// # Errors
    /// [`Error::Pipe`] for the first of: no nodes, a duplicate name or a name with an empty part, two inputs that take all
    /// arguments that are left, a parameter with an input, a value made twice or never, nodes in a cycle or out of order, an unused input, an output or a loss that
    /// is not the result of a node.
    pub fn check(&self) -> Result<()> {
        if self.placed().next().is_none() {
            return Err(Error::Pipe("the model has no nodes".into()));
        }
        self.check_names()?;
        self.check_inputs()?;
        self.check_parameters()?;
        let makers = self.makers()?;
        self.check_order(&makers)?;
        self.check_uses()?;
        self.check_results(&makers)
    }

    /// Returns the values that neither a node nor the caller uses. They waste time.
    pub fn dead_values(&self) -> Vec<ValueId> {
        let used = self.used();
        self.nodes
            .iter()
            .flat_map(|node| &node.outputs)
            .copied()
            .filter(|value| !used.contains(value))
            .collect()
    }

    fn check_names(&self) -> Result<()> {
        let inputs = self.inputs.iter().map(|input| ("input", &input.name));
        let nodes = self.nodes.iter().map(|node| ("node", &node.name));
        let outputs = self.outputs.iter().map(|output| ("output", &output.name));
        let mut seen = BTreeSet::new();
        for (what, name) in inputs.chain(nodes).chain(outputs) {
            if name.is_empty() {
                return Err(Error::Pipe(format!("{what} names must not be empty")));
            }
            if what == "node" && name.split('.').any(str::is_empty) {
                let reason = format!(
                    "the node name {name:?} has an empty part between dots; name it, or leave it out"
                );
                return Err(Error::Pipe(reason));
            }
            if !seen.insert((what, name)) {
                return Err(Error::Pipe(format!("two {what}s are named {name:?}; names are unique")));
            }
        }
        Ok(())
    }

    fn check_inputs(&self) -> Result<()> {
        let mut all = self.inputs.iter().filter(|input| input.kind == In::Args).map(|input| &input.name);
        match (all.next(), all.next()) {
            (Some(one), Some(other)) => Err(Error::Pipe(format!(
                "the inputs {one:?} and {other:?} both take all arguments that are left; declare one of them as In::Kwarg"
            ))),
            _ => Ok(()),
        }
    }

    fn check_parameters(&self) -> Result<()> {
        let is_wrong = |node: &&Node| {
            let stands_alone = matches!(node.kind, NodeKind::Parameter(_) | NodeKind::Shared);
            stands_alone && (!node.inputs.is_empty() || node.outputs.len() != 1)
        };
        let Some(node) = self.nodes.iter().find(is_wrong) else { return Ok(()) };
        let what = if node.kind == NodeKind::Shared { "shared module" } else { "parameter" };
        Err(Error::Pipe(format!("{what} {:?} takes nothing and makes one value", node.name)))
    }

    /// Returns the node that makes each value; `None` for an input.
    fn makers(&self) -> Result<BTreeMap<ValueId, Option<usize>>> {
        let inputs = self.inputs.iter().map(|input| (input.value, None));
        let nodes = self.nodes.iter().enumerate();
        let made = nodes.flat_map(|(i, node)| node.outputs.iter().map(move |&value| (value, Some(i))));
        let mut makers = BTreeMap::new();
        for (value, maker) in inputs.chain(made) {
            if makers.insert(value, maker).is_some() {
                return Err(Error::Pipe(format!("value {} is made twice", self.value_name(value))));
            }
        }
        Ok(makers)
    }

    fn check_order(&self, makers: &BTreeMap<ValueId, Option<usize>>) -> Result<()> {
        for (i, node) in self.nodes.iter().enumerate() {
            for value in &node.inputs {
                let reason = match makers.get(value) {
                    None => format!("node {:?} uses value {value}, which nothing makes", node.name),
                    Some(&Some(maker)) if maker >= i => match self.cycle(makers) {
                        Some(cycle) => {
                            format!("nodes in a cycle: {}", cycle.iter().map(|node| &node.name).join(" -> "))
                        }
                        None => {
                            let maker = &self.nodes[maker].name;
                            format!(
                                "node {:?} uses a value of node {maker:?}, which comes after it; move it behind that node",
                                node.name
                            )
                        }
                    },
                    Some(_) => continue,
                };
                return Err(Error::Pipe(reason));
            }
        }
        Ok(())
    }

    /// Returns a cycle: each node uses a result of the one before; the first and the last are the same.
    fn cycle(&self, makers: &BTreeMap<ValueId, Option<usize>>) -> Option<Vec<&Node>> {
        let before = |node: usize| self.nodes[node].inputs.iter().filter_map(|value| *makers.get(value)?);
        // Nodes that depend on no remaining node are removed repeatedly. The rest lies on or behind a cycle.
        let mut waiting: BTreeSet<usize> = (0..self.nodes.len()).collect();
        while let Some(ready) =
            waiting.iter().copied().find(|&node| before(node).all(|b| !waiting.contains(&b)))
        {
            waiting.remove(&ready);
        }
        let mut path = vec![*waiting.first()?];
        loop {
            let next = before(*path.last()?).find(|node| waiting.contains(node))?;
            if let Some(start) = path.iter().position(|&node| node == next) {
                let mut cycle: Vec<&Node> =
                    path[start..].iter().rev().map(|&node| &self.nodes[node]).collect();
                cycle.push(cycle[0]);
                return Some(cycle);
            }
            path.push(next);
        }
    }

    fn check_uses(&self) -> Result<()> {
        let used = self.used();
        match self.inputs.iter().find(|input| !used.contains(&input.value)) {
            Some(input) => Err(Error::Pipe(format!("nothing uses input {:?}; leave it out", input.name))),
            None => Ok(()),
        }
    }

    fn check_results(&self, makers: &BTreeMap<ValueId, Option<usize>>) -> Result<()> {
        let loss = self.loss.map(|loss| ("loss".to_owned(), loss.value));
        let outputs = self.outputs.iter().map(|output| (format!("output {:?}", output.name), output.value));
        for (what, value) in outputs.chain(loss) {
            let reason = match makers.get(&value) {
                None => format!("the {what} is value {value}, which nothing makes"),
                Some(None) => format!("the {what} is the input {:?}", self.value_name(value)),
                Some(&Some(node)) if self.nodes[node].is_replicated() => {
                    let replicated = match self.nodes[node].kind {
                        NodeKind::Shared => "shared module",
                        _ => "replicated parameter",
                    };
                    format!("the {what} is the {replicated} {:?}", self.nodes[node].name)
                }
                Some(_) => continue,
            };
            return Err(Error::Pipe(format!(
                "{reason}; make it the result of a node, if only of a function"
            )));
        }
        if self.outputs.is_empty() && self.loss.is_none() {
            return Err(Error::Pipe("the model has neither an output nor a loss".into()));
        }
        Ok(())
    }

    fn used(&self) -> BTreeSet<ValueId> {
        let nodes = self.nodes.iter().flat_map(|node| &node.inputs);
        let results =
            self.outputs.iter().map(|output| &output.value).chain(self.loss.as_ref().map(|loss| &loss.value));
        nodes.chain(results).copied().collect()
    }
}
