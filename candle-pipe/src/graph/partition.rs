//! Cuts a sequence of items into runs whose largest cost is minimal.
use super::Graph;
use crate::{Error, Result};
use std::collections::BTreeMap;

/// Costs of a graph's nodes in order. A run pays each replicated parameter that it uses once.
pub(super) struct NodeCosts {
    /// The nodes that belong to one stage.
    pub(super) nodes: Vec<usize>,
    /// Their own costs.
    own: Vec<f64>,
    /// The replicated parameters that each uses.
    uses: Vec<Vec<usize>>,
    /// The costs of the replicated parameters.
    shared: BTreeMap<usize, f64>,
}

impl NodeCosts {
    pub(super) fn new(graph: &Graph, cost: impl Fn(usize) -> Result<f64>) -> Result<Self> {
        let nodes: Vec<usize> = graph.placed().collect();
        let own = nodes.iter().map(|&node| cost(node)).collect::<Result<Vec<f64>>>()?;
        let replicated = (0..graph.nodes.len()).filter(|&node| graph.nodes[node].is_replicated());
        let shared =
            replicated.map(|node| Ok((node, cost(node)?))).collect::<Result<BTreeMap<usize, f64>>>()?;
        let made_by = |value| shared.keys().copied().find(|&node| graph.nodes[node].outputs.contains(value));
        let uses =
            nodes.iter().map(|&node| graph.nodes[node].inputs.iter().filter_map(made_by).collect()).collect();
        Ok(Self { nodes, own, uses, shared })
    }

    /// Returns the costs of the runs that begin with item `start`, the shortest run first.
    pub(super) fn runs(&self, start: usize) -> impl Iterator<Item = f64> + '_ {
        let mut seen = Vec::new();
        (start..self.nodes.len()).scan(0.0, move |total, item| {
            *total += self.own[item];
            for node in &self.uses[item] {
                if !seen.contains(node) {
                    seen.push(*node);
                    *total += self.shared[node];
                }
            }
            Some(*total)
        })
    }

    /// Returns the first nodes of `stages` runs, except the first run, so that the most expensive run is as cheap as
    /// possible.
    ///
    /// Exact, by dynamic programming over the start of the last run; of equal cuts the earliest wins.
    pub(super) fn cut(&self, stages: usize) -> Result<Vec<usize>> {
        let items = self.nodes.len();
        check_stages(stages, items)?;
        // best[i]: the cost of the most expensive run and the starts of later runs, if the items from i on are cut.
        let mut best: Vec<Option<(f64, Vec<usize>)>> = vec![None; items + 1];
        best[items] = Some((0.0, Vec::new()));
        for _ in 0..stages {
            let mut next = vec![None; items + 1];
            for (start, least) in next.iter_mut().enumerate() {
                for (end, run) in (start + 1..).zip(self.runs(start)) {
                    let Some((rest, cuts)) = &best[end] else { continue };
                    let worst = run.max(*rest);
                    if least.as_ref().is_none_or(|(least, _)| worst < *least) {
                        let cuts = if end < items { [&[end], cuts.as_slice()].concat() } else { Vec::new() };
                        *least = Some((worst, cuts));
                    }
                }
            }
            best = next;
        }
        let (_, cuts) = best[0].take().ok_or_else(|| Error::Pipe("costs that are no numbers".into()))?;
        Ok(cuts.into_iter().map(|item| self.nodes[item]).collect())
    }
}

/// Refuses a number of stages that is 0 or larger than the number of nodes.
pub(super) fn check_stages(stages: usize, nodes: usize) -> Result<()> {
    if stages == 0 || stages > nodes {
        return Err(Error::Pipe(format!(
            "{stages} stages of {nodes} nodes: expected at least 1 stage, and at most one per node"
        )));
    }
    Ok(())
}
