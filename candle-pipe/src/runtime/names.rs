//! Checks the names of parameters across ranks, after construction.
use crate::graph::{NodeKind, PipeInfo, Share, ShareGroup};
use crate::tape::StageModule;
use crate::{Error, Result};
use candle_core::Tensor;
use candle_dist::ProcessGroup;
use candle_dist::bits::digest;
use itertools::{EitherOrBoth, Itertools};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The stages that request a variable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct VariableRequest {
    stages: Vec<usize>,
    /// The replicated parameter or shared module that it is a copy of.
    share: Option<String>,
    /// A digest of its values, if the parameter is not the variable but made of it.
    cast: Option<u64>,
}

/// Variables by name.
type VariableRequests = BTreeMap<String, VariableRequest>;

/// Returns the stages that this rank has built, by number, and the variables that stages of several ranks request
/// without a declaration. Each rank has a copy of such a variable with a part of its gradient, so it is replicated.
/// Every rank calls this function. It fails on all ranks if one rank could not build its stages, or if only some stages
/// declare a variable as shared.
pub(super) fn check(
    group: &ProcessGroup,
    info: &PipeInfo,
    built: Result<Vec<StageModule>>,
) -> Result<(BTreeMap<usize, StageModule>, Vec<ShareGroup>)> {
    let mine = built.as_ref().map_err(Error::to_string);
    let mine = mine.and_then(|stages| names(group, info, stages).map_err(|error| error.to_string()));
    let unreadable = |error: serde_json::Error| Error::Pipe(format!("the names of parameters: {error}"));
    let texts = group.all_gather_text(&serde_json::to_string(&mine).map_err(unreadable)?)?;
    let stages = built?;
    let mut seen: BTreeMap<String, (Vec<usize>, VariableRequest)> = BTreeMap::new();
    for (rank, text) in texts.iter().enumerate() {
        let names: Result<VariableRequests, String> = serde_json::from_str(text).map_err(unreadable)?;
        let names =
            names.map_err(|said| Error::Pipe(format!("rank {rank} cannot build its stages: {said}")))?;
        for (name, asked) in names {
            match seen.get_mut(&name) {
                Some((ranks, other)) if other.cast != asked.cast => {
                    return Err(unlike_casts(&name, ranks[0], rank));
                }
                Some((ranks, other)) if other.share == asked.share => {
                    ranks.push(rank);
                    other.stages.extend(asked.stages);
                }
                Some((ranks, _)) => {
                    return Err(Error::Pipe(format!(
                        "nodes on ranks {} and {rank} ask for the parameter {name:?}, which one of them has from a declared \
                         parameter or shared module and the other has not; give both the declared one",
                        ranks.iter().join(", ")
                    )));
                }
                None => _ = seen.insert(name, (vec![rank], asked)),
            }
        }
    }
    let undeclared = seen.into_iter().filter(|(_, (ranks, asked))| ranks.len() > 1 && asked.share.is_none());
    let found = undeclared.map(|(name, (_, VariableRequest { mut stages, .. }))| {
        stages.sort_unstable();
        ShareGroup { name, share: Share::Replicate, stages }
    });
    let found = found.collect_vec();
    if group.rank() == 0 {
        for ShareGroup { name, stages, .. } in &found {
            candle_dist::warn(format_args!(
                "stages {} share the parameter {name:?} undeclared; it is replicated, and its gradients are summed",
                stages.iter().join(", ")
            ));
        }
    }
    Ok((stages.into_iter().map(|stage| (stage.def().index, stage)).collect(), found))
}

/// Refuses variables whose values differ on ranks that make them equal, where parameters were made of the values before.
fn unlike_casts(name: &str, first: usize, rank: usize) -> Error {
    Error::Pipe(format!(
        "the parameter {name:?} is made of a variable, such as by a cast, that has other values on rank {rank} than on rank \
         {first}, and would keep them when the variables are made equal; make them equal before, or give the model the variable"
    ))
}

/// Returns a digest of a variable if parameters are made of it.
fn cast(stage: &StageModule, name: &str, variable: &Tensor) -> Result<Option<u64>> {
    let is_itself = stage.parameters().get(name).is_some_and(|parameter| parameter.id() == variable.id());
    Ok(if is_itself { None } else { Some(digest(variable)?) })
}

/// Checks that the variables that parameters are made of are the same on the ranks of a group. Every rank of it calls this.
pub(super) fn check_casts(group: &ProcessGroup, stages: &BTreeMap<usize, StageModule>) -> Result<()> {
    let mut mine = BTreeMap::new();
    for stage in stages.values() {
        for (name, variable) in stage.variables() {
            mine.extend(cast(stage, name, variable)?.map(|digest| (name, digest)));
        }
    }
    let texts =
        group.all_gather_text(&mine.iter().map(|(name, digest)| format!("{digest:x} {name}")).join("\n"))?;
    for (rank, text) in texts.iter().enumerate().skip(1) {
        let unlike = text.lines().zip_longest(texts[0].lines()).find_map(|pair| match pair {
            EitherOrBoth::Both(here, first) if here == first => None,
            EitherOrBoth::Both(line, _) | EitherOrBoth::Left(line) | EitherOrBoth::Right(line) => Some(line),
        });
        if let Some(line) = unlike {
            let name = line.split_once(' ').map_or(line, |(_, name)| name);
            return Err(unlike_casts(name, group.ranks()[0], group.ranks()[rank]));
        }
    }
    Ok(())
}

/// Returns the variables of some stages.
fn names(group: &ProcessGroup, info: &PipeInfo, stages: &[StageModule]) -> Result<VariableRequests> {
    let mut names: BTreeMap<String, (VariableRequest, &Tensor)> = BTreeMap::new();
    for stage in stages {
        let index = stage.def().index;
        for (name, variable) in stage.variables() {
            let cast = cast(stage, name, variable)?;
            let new = || (VariableRequest { stages: Vec::new(), share: None, cast }, variable);
            let (asked, other) = names.entry(name.clone()).or_insert_with(new);
            if other.id() != variable.id() {
                return Err(Error::Pipe(format!(
                    "stages {} and {index} ask for the parameter {name:?} and get a variable each, of which one would miss the \
                     other's gradient; declare it with PipeBuilder::parameter or shared_module",
                    asked.stages.iter().join(", ")
                )));
            }
            asked.stages.push(index);
        }
    }
    let mut names: VariableRequests = names.into_iter().map(|(name, (asked, _))| (name, asked)).collect();
    let is_module =
        |name: &str| info.graph.nodes.iter().any(|node| node.kind == NodeKind::Shared && node.name == name);
    for share in info.replicated() {
        for stage in stages.iter().filter(|stage| share.stages.contains(&stage.def().index)) {
            if group.size() > 1 && is_module(&share.name) && !stage.asked_for(&share.name) {
                return Err(Error::Pipe(format!(
                    "{:?}, which stages {} share, asks its scope for no parameters, so that nothing would sum the gradients of \
                     those that it may bring along; ask the scope for them, or declare them with PipeBuilder::parameter; for a \
                     module without parameters use func",
                    share.name,
                    share.stages.iter().join(", ")
                )));
            }
            for name in stage.copy_of(&share.name).keys() {
                if let Some(asked) = names.get_mut(name) {
                    asked.share = Some(share.name.clone());
                }
            }
        }
    }
    Ok(names)
}
