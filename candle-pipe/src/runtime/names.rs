//! Checks the names of parameters across ranks, after construction.
use crate::graph::{NodeKind, PipeInfo, Share, ShareGroup};
use crate::tape::StageModule;
use crate::{Error, Result};
use candle_core::Tensor;
use candle_dist::ProcessGroup;
use itertools::Itertools;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The stages that request a variable.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
struct Asked {
    stages: Vec<usize>,
    /// The replicated parameter or shared module that it is a copy of.
    share: Option<String>,
}

/// Variables by name.
type Names = BTreeMap<String, Asked>;

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
    let mut seen: BTreeMap<String, (Vec<usize>, Asked)> = BTreeMap::new();
    for (rank, text) in texts.iter().enumerate() {
        let names: Result<Names, String> = serde_json::from_str(text).map_err(unreadable)?;
        let names = names.map_err(|said| Error::Pipe(format!("rank {rank} cannot build its stages: {said}")))?;
        for (name, asked) in names {
            match seen.get_mut(&name) {
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
    let found = undeclared.map(|(name, (_, Asked { mut stages, .. }))| {
        stages.sort_unstable();
        ShareGroup { name, share: Share::Replicate, stages }
    });
    let found = found.collect_vec();
    if group.rank() == 0 {
        for ShareGroup { name, stages, .. } in &found {
            log::warn!(
                "stages {} share the parameter {name:?} undeclared; it is replicated, and its gradients are summed",
                stages.iter().join(", ")
            );
        }
    }
    Ok((stages.into_iter().map(|stage| (stage.def().index, stage)).collect(), found))
}

/// Returns the variables of some stages.
fn names(group: &ProcessGroup, info: &PipeInfo, stages: &[StageModule]) -> Result<Names> {
    let mut names: BTreeMap<String, (Asked, &Tensor)> = BTreeMap::new();
    for stage in stages {
        let index = stage.def().index;
        for (name, variable) in stage.parameters().iter().filter(|(_, tensor)| tensor.is_variable()) {
            let new = || (Asked { stages: Vec::new(), share: None }, variable);
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
    let mut names: Names = names.into_iter().map(|(name, (asked, _))| (name, asked)).collect();
    let is_module = |name: &str| info.graph.nodes.iter().any(|node| node.kind == NodeKind::Shared && node.name == name);
    for share in info.replicated() {
        for stage in stages.iter().filter(|stage| share.stages.contains(&stage.def().index)) {
            if group.size() > 1 && is_module(&share.name) && stage.copy_of(&share.name).next().is_none() {
                return Err(Error::Pipe(format!(
                    "{:?}, which stages {} share, asks its scope for no parameters, so that nothing would sum the gradients of \
                     those that it may bring along; ask the scope for them, or declare them with PipeBuilder::parameter; for a \
                     module without parameters use func",
                    share.name,
                    share.stages.iter().join(", ")
                )));
            }
            for (name, _) in stage.copy_of(&share.name) {
                let new = || Asked { stages: vec![stage.def().index], share: None };
                names.entry(name.clone()).or_insert_with(new).share = Some(share.name.clone());
            }
        }
    }
    Ok(names)
}
