//! Where a model is cut.
use super::Graph;
use super::suggest::suggestion;
use crate::{Error, Result};
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

/// A rule that cuts a model: what [`EqualCount`](super::EqualCount) and its kind are, or one of your own.
pub trait SplitPolicy {
    /// The nodes that stages begin with, but for the first stage; ascending, and none without a place of its own.
    ///
    /// # Errors
    /// If the model cannot be cut so.
    fn cuts(&self, graph: &Graph) -> Result<Vec<usize>>;
}

/// Where a model is cut into stages: at points, or by a policy.
///
/// Points add to those declared with [`PipeBuilder::split`](crate::PipeBuilder::split); cuts at one place are one.
///
/// ```
/// use candle_pipe::{EqualCount, SplitPoint, SplitSpec};
///
/// let at_points = SplitSpec::at([("layers.2", SplitPoint::Beginning), ("layers.3", SplitPoint::End)]);
/// let by_policy = SplitSpec::from(EqualCount(4));
/// let as_declared = SplitSpec::declared();
/// # let _ = (at_points, by_policy, as_declared);
/// ```
pub struct SplitSpec(Rule);

enum Rule {
    Points(Vec<(String, SplitPoint)>),
    Policy(Box<dyn SplitPolicy>),
}

impl SplitSpec {
    /// At the sides of nodes, each named by its full name or by a prefix that it has in common with others.
    pub fn at<N: Into<String>>(points: impl IntoIterator<Item = (N, SplitPoint)>) -> Self {
        Self(Rule::Points(points.into_iter().map(|(name, point)| (name.into(), point)).collect()))
    }

    /// Where the model was declared with cuts, and nowhere else.
    pub fn declared() -> Self {
        Self(Rule::Points(Vec::new()))
    }

    /// The nodes before which the graph is cut, ascending.
    ///
    /// # Errors
    /// [`Error::Pipe`] for a name that no node has, a policy for a model that was declared with cuts, or what the
    /// policy cannot do.
    pub fn cuts(&self, graph: &Graph) -> Result<Vec<usize>> {
        match &self.0 {
            Rule::Policy(_) if !graph.splits.is_empty() => Err(Error::Pipe(
                "the model declares cuts of its own; cut it by those or by a policy, not by both".into(),
            )),
            Rule::Policy(policy) => policy.cuts(graph),
            Rule::Points(points) => {
                let named = points.iter().map(|(name, point)| cut_at(graph, name, *point));
                let all = graph.splits.iter().map(|&cut| Ok(cut)).chain(named);
                let cuts =
                    all.map(|cut| cut.map(|cut| next_placed(graph, cut))).collect::<Result<BTreeSet<usize>>>()?;
                Ok(cuts.into_iter().collect())
            }
        }
    }
}

impl<P: SplitPolicy + 'static> From<P> for SplitSpec {
    fn from(policy: P) -> Self {
        Self(Rule::Policy(Box::new(policy)))
    }
}

impl fmt::Debug for SplitSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.0 {
            Rule::Points(points) => f.debug_tuple("SplitSpec").field(points).finish(),
            Rule::Policy(_) => f.write_str("SplitSpec(a policy)"),
        }
    }
}

/// The first node at or after `node` that stands at a place of its own.
fn next_placed(graph: &Graph, node: usize) -> usize {
    graph.placed().find(|&placed| placed >= node).unwrap_or(graph.nodes.len())
}

fn cut_at(graph: &Graph, name: &str, point: SplitPoint) -> Result<usize> {
    let members: Vec<usize> = graph.placed().filter(|&node| is_within(&graph.nodes[node].name, name)).collect();
    let (Some(&first), Some(&last)) = (members.first(), members.last()) else {
        let names = graph.placed().flat_map(|node| prefixes(&graph.nodes[node].name));
        return Err(Error::Pipe(format!("nothing to split at is named {name:?}{}", suggestion(name, names))));
    };
    let (cut, side) = match point {
        SplitPoint::Beginning => (first, "before"),
        SplitPoint::End => (last + 1, "behind"),
    };
    let cut = next_placed(graph, cut);
    if cut == next_placed(graph, 0) || cut == graph.nodes.len() {
        return Err(Error::Pipe(format!("a split {side} {name:?} would leave an empty stage: nothing is {side} it")));
    }
    Ok(cut)
}

/// Whether a node is the module `prefix` or in it.
fn is_within(name: &str, prefix: &str) -> bool {
    name.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with('.'))
}

/// `a`, `a.b` and `a.b.c` of `a.b.c`.
fn prefixes(name: &str) -> impl Iterator<Item = &str> {
    name.match_indices('.').map(|(dot, _)| &name[..dot]).chain([name])
}
