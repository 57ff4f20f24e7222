//! Checks that all ranks hold the same parameters.
use super::sharded::{conflict, rows_of};
use crate::{Error, ProcessGroup, Result};
use candle_core::Tensor;
use itertools::Itertools;
use std::ops::Deref;

/// Checks that every rank of `group` names the same parameters, in the same order, with the same shapes and dtypes.
///
/// Makes two small collectives, for any number of parameters; every rank must call it. Tensors may be anything that
/// dereferences to one: `&Tensor`, [`Var`](candle_core::Var).
///
/// # Errors
/// The same [`Error::InvalidArgument`] on every rank. If two ranks of the group hold different shards of a parameter
/// ([`ShardedVar`](crate::ShardedVar)), it names the parameter. Otherwise it is for the first rank that differs from rank 0 of the group, and
/// names the first parameter that one of the two lacks, or else the first that differs, with both shapes and dtypes.
///
/// ```
/// use candle_core::{DType, Device, Tensor};
/// use candle_dist::{World, verify_parameter_shapes};
///
/// let errors = World::threads(2).run(|ctx| -> candle_dist::Result<String> {
///     let weight = Tensor::zeros((2, 3 + ctx.rank()), DType::F32, &Device::Cpu)?;
///     let error = verify_parameter_shapes(ctx.group(), &[("weight", &weight)]).unwrap_err();
///     Ok(error.to_string())
/// })?;
/// let same = "rank 1: verify_parameter_shapes: \"weight\" is f32[2, 4] here and f32[2, 3] on rank 0";
/// assert_eq!(errors, [same, same]);
/// # Ok::<(), candle_dist::WorldError>(())
/// ```
#[track_caller]
pub fn verify_parameter_shapes<N, T>(group: &ProcessGroup, parameters: &[(N, T)]) -> Result<()>
where
    N: AsRef<str>,
    T: Deref<Target = Tensor>,
{
    let describe = |(name, t): &(N, T)| {
        let rows = rows_of(t).iter().flat_map(|rows| rows.iter()).map(|row| row.iter().join(" ")).join(";");
        format!("{:?}\t{}{:?}\t{rows}", name.as_ref(), t.dtype().as_str(), t.dims())
    };
    let texts = group.all_gather_text(&parameters.iter().map(describe).join("\n"))?;
    let lists: Vec<Vec<ParameterText<'_>>> = texts.iter().map(|text| parse(text)).collect();
    let ranks = group.ranks();
    let shards = texts.iter().map(|text| text.lines().find_map(|line| shard(line, ranks)));
    if let Some((rank, reason)) = ranks.iter().zip(shards).find_map(|(rank, reason)| Some((*rank, reason?))) {
        return Err(Error::InvalidArgument { rank, op: "verify_parameter_shapes", reason });
    }
    for (rank, list) in ranks.iter().zip(&lists) {
        if let Some(reason) = difference(list, &lists[0], ranks[0]) {
            return Err(Error::InvalidArgument { rank: *rank, op: "verify_parameter_shapes", reason });
        }
    }
    Ok(())
}

/// A quoted name, and a text with dtype and shape.
type ParameterText<'a> = (&'a str, &'a str);

/// Parses the list. Quoted names contain neither tabs nor line ends.
fn parse(text: &str) -> Vec<ParameterText<'_>> {
    let parameter = |line| {
        let (name, rest): (&str, &str) = str::split_once(line, '\t')?;
        Some((name, rest.split_once('\t').map_or(rest, |(shape, _)| shape)))
    };
    text.lines().filter_map(parameter).collect()
}

/// Returns why the parameter of a line cannot be the same on all ranks of a group.
fn shard(line: &str, group: &[usize]) -> Option<String> {
    let (name, rows) = (line.split('\t').next()?, line.rsplit('\t').next()?);
    let row = |row: &str| row.split(' ').filter_map(|rank| rank.parse().ok()).collect::<Vec<usize>>();
    conflict(name, &rows.split(';').map(row).collect_vec(), group)
}

/// Describes the first difference between one rank's list and the reference.
fn difference(list: &[ParameterText<'_>], reference: &[ParameterText<'_>], at: usize) -> Option<String> {
    if let Some((name, _)) = list.iter().duplicates_by(|(name, _)| name).next() {
        return Some(format!("{name} is named twice"));
    }
    if list == reference {
        return None;
    }
    let absent = |from: &[ParameterText<'_>], of: &[ParameterText<'_>]| {
        let known: std::collections::HashSet<_> = from.iter().map(|(name, _)| *name).collect();
        of.iter().map(|(name, _)| *name).find(|name| !known.contains(name)).map(str::to_string)
    };
    if let Some(name) = absent(list, reference) {
        return Some(format!("{name} is missing here; rank {at} has it"));
    }
    if let Some(name) = absent(reference, list) {
        return Some(format!("{name} is extra here; rank {at} lacks it"));
    }
    let pairs = || list.iter().zip(reference).enumerate();
    if let Some((i, (mine, theirs))) = pairs().find(|(_, (mine, theirs))| mine.0 != theirs.0) {
        return Some(format!(
            "parameter {i} is {} here and {} on rank {at}; give them in one order",
            mine.0, theirs.0
        ));
    }
    let (_, (mine, theirs)) = pairs().find(|(_, (mine, theirs))| mine != theirs)?;
    Some(format!("{} is {} here and {} on rank {at}", mine.0, mine.1, theirs.1))
}
