//! Cuts of a model into stages that take about as long as each other.
use crate::{Error, Result};
use std::ops::Range;

/// Cuts nodes in a row into one range a stage so that the most costly stage costs as little as it can.
///
/// `costs` are those of the nodes and `extra` is what each stage costs besides them, such as the loss on the last one;
/// there are as many stages as `extra` has entries, and each gets a node. The first cuts of equal worth are taken.
///
/// ```
/// use candle_pipe::schedule::balance;
///
/// assert_eq!(balance(&[1.0, 1.0, 1.0, 1.0, 2.0], &[0.0, 0.0])?, [0..3, 3..5]);
/// assert_eq!(balance(&[1.0, 1.0, 1.0, 1.0, 2.0], &[0.0, 2.0])?, [0..4, 4..5]);
/// # Ok::<(), candle_pipe::Error>(())
/// ```
///
/// # Errors
/// If there is no stage or there are more stages than nodes, or if a cost is negative or not finite.
pub fn balance(costs: &[f64], extra: &[f64]) -> Result<Vec<Range<usize>>> {
    let (nodes, stages) = (costs.len(), extra.len());
    if stages == 0 || stages > nodes {
        return Err(Error::Schedule(format!("{nodes} nodes cannot be cut into {stages} stages of one node at least")));
    }
    if let Some(cost) = costs.iter().chain(extra).find(|cost| !(cost.is_finite() && **cost >= 0.0)) {
        return Err(Error::Schedule(format!("a node or stage costs {cost}: give a finite cost that is not negative")));
    }
    // What the nodes before each place cost together.
    let mut before = vec![0.0];
    before.extend(costs.iter().scan(0.0, |sum, cost| {
        *sum += cost;
        Some(*sum)
    }));
    // For each number of nodes the least that the most costly of the stages so far costs, and for each of these stages
    // where it begins then.
    let mut least: Vec<f64> = before.iter().map(|cost| cost + extra[0]).collect();
    let mut begins = vec![vec![0; nodes + 1]];
    for (stage, extra) in extra.iter().enumerate().skip(1) {
        let (mut next, mut begin) = (vec![f64::INFINITY; nodes + 1], vec![0; nodes + 1]);
        for end in stage + 1..=nodes {
            for cut in stage..end {
                let worst = least[cut].max(before[end] - before[cut] + extra);
                if worst < next[end] {
                    (next[end], begin[end]) = (worst, cut);
                }
            }
        }
        least = next;
        begins.push(begin);
    }
    let mut end = nodes;
    let mut ranges: Vec<_> = begins
        .iter()
        .rev()
        .map(|begin| {
            let range = begin[end]..end;
            end = range.start;
            range
        })
        .collect();
    ranges.reverse();
    Ok(ranges)
}
