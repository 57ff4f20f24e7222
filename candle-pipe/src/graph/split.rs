//! The cuts of a model.
use super::suggest::suggestion;
use super::{Graph, Node, NodeKind};
use crate::{Error, Result};
use itertools::Itertools;
use std::collections::BTreeSet;
use std::fmt;

/// A side of a node, or of a group of nodes whose names have one prefix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SplitPoint {
    /// A stage begins with it.
    Beginning,
    /// A stage ends with it.
    End,
}

/// A rule that cuts a model, such as [`EqualCount`](super::EqualCount) or your own.
pub trait SplitPolicy {
    /// Returns the first node of each stage except the first stage, ascending. Replicated nodes are not allowed.
    ///
    /// # Errors
    /// If the model cannot be cut by this rule.
    fn cuts(&self, graph: &Graph) -> Result<Vec<usize>>;
}

/// The cuts of a model: at points, or by a policy.
///
/// Points add to those declared with [`PipeBuilder::split`](crate::PipeBuilder::split). Duplicate cuts count once.
///
/// ```
/// use candle_pipe::{EqualCount, SplitPoint, SplitSpec};
///
/// let at_points = SplitSpec::at([("layers.2", SplitPoint::Beginning), ("layers.3", SplitPoint::End)]);
/// let by_policy = SplitSpec::from(EqualCount(4));
/// let as_declared = SplitSpec::declared();
/// # let _ = (at_points, by_policy, as_declared);
/// ```
pub struct SplitSpec(SplitRule);

enum SplitRule {
    Points(Vec<(String, SplitPoint)>),
    Policy(Box<dyn SplitPolicy>),
}

impl SplitSpec {
    /// Cuts at the sides of nodes, each named by its full name or by a common prefix of several nodes.
    pub fn at<N: Into<String>>(points: impl IntoIterator<Item = (N, SplitPoint)>) -> Self {
        Self(SplitRule::Points(points.into_iter().map(|(name, point)| (name.into(), point)).collect()))
    }

    /// Cuts only where the model's declaration has cuts.
    pub fn declared() -> Self {
        Self(SplitRule::Points(Vec::new()))
    }

    /// Returns the nodes before which the graph is cut, ascending.
    ///
    /// # Errors
    /// [`Error::Pipe`] for a name that no node has, for a policy on a model that declares cuts, and those of the
    /// policy.
    pub fn cuts(&self, graph: &Graph) -> Result<Vec<usize>> {
        match &self.0 {
            SplitRule::Policy(_) if !graph.splits.is_empty() => Err(Error::Pipe(
                "the model declares cuts of its own; cut it by those or by a policy, not by both".into(),
            )),
            SplitRule::Policy(policy) => policy.cuts(graph),
            SplitRule::Points(points) => {
                let named = points.iter().map(|(name, point)| cut_at(graph, name, *point));
                let all = graph.splits.iter().map(|&cut| Ok(cut)).chain(named);
                let cuts = all
                    .map(|cut| cut.map(|cut| next_placed(graph, cut)))
                    .collect::<Result<BTreeSet<usize>>>()?;
                Ok(cuts.into_iter().collect())
            }
        }
    }
}

impl<P: SplitPolicy + 'static> From<P> for SplitSpec {
    fn from(policy: P) -> Self {
        Self(SplitRule::Policy(Box::new(policy)))
    }
}

impl fmt::Debug for SplitSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            SplitRule::Points(points) => f.debug_tuple("SplitSpec").field(points).finish(),
            SplitRule::Policy(_) => f.write_str("SplitSpec(a policy)"),
        }
    }
}

/// Returns the first node at or after `node` that belongs to one stage.
fn next_placed(graph: &Graph, node: usize) -> usize {
    graph.placed().find(|&placed| placed >= node).unwrap_or(graph.nodes.len())
}

fn cut_at(graph: &Graph, name: &str, point: SplitPoint) -> Result<usize> {
    let members: Vec<usize> =
        graph.placed().filter(|&node| is_within(&graph.nodes[node].name, name)).collect();
    let (Some(&first), Some(&last)) = (members.first(), members.last()) else {
        if let Some(shared) =
            graph.nodes.iter().find(|node| node.is_replicated() && is_within(&node.name, name))
        {
            return Err(Error::Pipe(not_at_shared(graph, shared)));
        }
        let names = graph.placed().flat_map(|node| prefixes(&graph.nodes[node].name));
        return Err(Error::Pipe(format!("nothing to split at is named {name:?}{}", suggestion(name, names))));
    };
    let (cut, side) = match point {
        SplitPoint::Beginning => (first, "before"),
        SplitPoint::End => (last + 1, "behind"),
    };
    let cut = next_placed(graph, cut);
    if cut == next_placed(graph, 0) || cut == graph.nodes.len() {
        return Err(Error::Pipe(format!(
            "a split {side} {name:?} would leave an empty stage: nothing is {side} it"
        )));
    }
    Ok(cut)
}

/// Returns why the model cannot be split at a node that is in no single stage.
fn not_at_shared(graph: &Graph, shared: &Node) -> String {
    let what = if shared.kind == NodeKind::Shared { "shared module" } else { "replicated parameter" };
    let users =
        graph.nodes.iter().filter(|node| node.inputs.iter().any(|input| shared.outputs.contains(input)));
    let users = users.map(|node| format!("{:?}", node.name)).join(", ");
    format!(
        "a split at {:?}, a {what}: each stage that uses it has it, so it has no side; split at a node that uses it: {users}",
        shared.name
    )
}

/// Returns whether a node is the module `prefix` or in it.
fn is_within(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// Returns `a`, `a.b` and `a.b.c` for `a.b.c`.
fn prefixes(name: &str) -> impl Iterator<Item = &str> {
    name.match_indices('.').map(|(dot, _)| &name[..dot]).chain([name])
}
