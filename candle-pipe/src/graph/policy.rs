//! Rules that cut a model into stages.
use super::partition::{NodeCosts, check_stages};
use super::suggest::suggestion;
use super::{Graph, SplitPolicy, StageLayout};
use crate::cuts::microbatch_sizes;
use crate::{Error, Result};
use std::collections::BTreeMap;

/// Cuts into this many stages with numbers of nodes that differ by at most one; the first stages have more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EqualCount(pub usize);

/// Cuts into this many stages so that the largest number of parameters is minimal.
///
/// A replicated parameter counts in every stage that uses it. Requires
/// [`PipeBuilder::measure`](crate::PipeBuilder::measure) before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct EqualParams(pub usize);

/// Begins a new stage where one more node would exceed this many elements of parameters.
///
/// A node that is larger by itself is a stage of its own. A parameter that is used several times in a stage counts
/// once. Requires [`PipeBuilder::measure`](crate::PipeBuilder::measure) before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SizeThreshold(pub usize);

/// Cuts into stages so that the most expensive one is as cheap as possible, by measured costs such as times.
///
/// ```
/// use candle_pipe::graph::{Graph, NodeKind, Node, Output, ValueId};
/// use candle_pipe::{BalancedCost, SplitPolicy};
/// # let node = |i: usize| Node {
/// #     name: format!("layers.{i}"),
/// #     kind: NodeKind::Function,
/// #     inputs: (i > 0).then(|| ValueId(i - 1)).into_iter().collect(),
/// #     outputs: vec![ValueId(i)],
/// #     weight: None,
/// # };
/// # let graph = Graph { nodes: (0..4).map(node).collect(), ..Graph::default() };
///
/// let costs = [("layers.0", 1.0), ("layers.1", 1.0), ("layers.2", 1.0), ("layers.3", 3.0)];
/// assert_eq!(BalancedCost::new(2, costs).cuts(&graph)?, [3]); // the last layer alone
/// # Ok::<(), candle_pipe::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct BalancedCost {
    /// The number of stages.
    pub stages: usize,
    /// The costs of nodes, by name; the default is 0.
    pub costs: BTreeMap<String, f64>,
}

/// The former name of [`BalancedCost`].
#[deprecated(since = "0.1.0", note = "renamed to BalancedCost")]
pub type Balanced = BalancedCost;

impl BalancedCost {
    /// Creates a policy for `stages` stages with these costs of nodes.
    pub fn new<N: Into<String>>(stages: usize, costs: impl IntoIterator<Item = (N, f64)>) -> Self {
        Self { stages, costs: costs.into_iter().map(|(name, cost)| (name.into(), cost)).collect() }
    }
}

impl SplitPolicy for EqualCount {
    fn cuts(&self, graph: &Graph) -> Result<Vec<usize>> {
        let nodes: Vec<usize> = graph.placed().collect();
        check_stages(self.0, nodes.len())?;
        let ends = microbatch_sizes(nodes.len(), self.0).into_iter().scan(0, |end, size| {
            *end += size;
            Some(*end)
        });
        Ok(ends.take(self.0 - 1).map(|end| nodes[end]).collect())
    }
}

impl SplitPolicy for EqualParams {
    fn cuts(&self, graph: &Graph) -> Result<Vec<usize>> {
        NodeCosts::new(graph, |node| weight(graph, node))?.cut(self.0)
    }
}

impl SplitPolicy for SizeThreshold {
    fn cuts(&self, graph: &Graph) -> Result<Vec<usize>> {
        let costs = NodeCosts::new(graph, |node| weight(graph, node))?;
        let (mut cuts, mut start) = (Vec::new(), 0);
        // A stage is as long as fits, and never empty.
        while let Some(more) = costs.runs(start).skip(1).position(|run| run > self.0 as f64) {
            start += more + 1;
            cuts.push(costs.nodes[start]);
        }
        Ok(cuts)
    }
}

impl SplitPolicy for BalancedCost {
    fn cuts(&self, graph: &Graph) -> Result<Vec<usize>> {
        let names = || graph.nodes.iter().map(|node| node.name.as_str());
        if let Some(name) = self.costs.keys().find(|name| !names().any(|known| known == *name)) {
            return Err(Error::Pipe(format!(
                "a cost for node {name:?}, which is not there{}",
                suggestion(name, names())
            )));
        }
        if let Some((name, cost)) = self.costs.iter().find(|(_, cost)| !(cost.is_finite() && **cost >= 0.0)) {
            return Err(Error::Pipe(format!(
                "node {name:?} costs {cost}: expected a finite number of at least 0"
            )));
        }
        NodeCosts::new(graph, |node| Ok(self.costs.get(&graph.nodes[node].name).copied().unwrap_or(0.0)))?
            .cut(self.stages)
    }
}

impl SplitPolicy for StageLayout {
    fn cuts(&self, graph: &Graph) -> Result<Vec<usize>> {
        self.place(graph)
    }
}

fn weight(graph: &Graph, node: usize) -> Result<f64> {
    let node = &graph.nodes[node];
    let unknown =
        || Error::Pipe(format!("the size of node {:?} is not known; measure the model first", node.name));
    node.weight.map(|elements| elements as f64).ok_or_else(unknown)
}
