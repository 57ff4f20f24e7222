//! Checks the names of parameters across ranks, after construction.
use crate::graph::ShareGroup;
use crate::tape::StageModule;
use crate::{Error, Result};
use candle_dist::ProcessGroup;
use std::collections::BTreeMap;

/// Names of variables, each with the replicated parameter that it is a copy of, if any.
type Names = BTreeMap<String, Option<String>>;

/// Returns the stages that this rank has built, by number; if a rank could not build its stages, all ranks return an
/// error.
///
/// Refuses variables that stages of several ranks use and that are not replicated parameters: each rank would have a
/// copy with a part of the gradient. Every rank must call it.
pub(super) fn check(
    group: &ProcessGroup,
    replicated: &[&ShareGroup],
    built: Result<Vec<StageModule>>,
) -> Result<BTreeMap<usize, StageModule>> {
    let mine = built.as_ref().map(|stages| names(replicated, stages)).map_err(Error::to_string);
    let unreadable = |error: serde_json::Error| Error::Pipe(format!("the names of parameters: {error}"));
    let texts = group.all_gather_text(&serde_json::to_string(&mine).map_err(unreadable)?)?;
    let stages = built?;
    let mut seen: BTreeMap<String, (usize, Option<String>)> = BTreeMap::new();
    for (rank, text) in texts.iter().enumerate() {
        let names: Result<Names, String> = serde_json::from_str(text).map_err(unreadable)?;
        let names = names.map_err(|said| Error::Pipe(format!("rank {rank} cannot build its stages: {said}")))?;
        for (name, share) in names {
            match seen.get(&name) {
                Some((_, other)) if share.is_some() && *other == share => {}
                Some((other, _)) => {
                    return Err(Error::Pipe(format!(
                        "nodes on ranks {other} and {rank} use the parameter {name:?}, so each would have a part of \
                         its gradient; declare it with PipeBuilder::parameter and Share::Replicate or Share::Transmit"
                    )));
                }
                None => _ = seen.insert(name, (rank, share)),
            }
        }
    }
    Ok(stages.into_iter().map(|stage| (stage.def().index, stage)).collect())
}

/// Returns the names of the variables of some stages.
fn names(replicated: &[&ShareGroup], stages: &[StageModule]) -> Names {
    let mut names = Names::new();
    for stage in stages {
        let variables = stage.parameters().iter().filter(|(_, tensor)| tensor.is_variable());
        variables.for_each(|(name, _)| _ = names.entry(name.clone()).or_default());
    }
    for share in replicated {
        let copies = stages.iter().flat_map(|stage| stage.copy_of(&share.name));
        copies.for_each(|(name, _)| _ = names.insert(name.clone(), Some(share.name.clone())));
    }
    names
}
