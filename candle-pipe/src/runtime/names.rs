//! Names of parameters on all ranks.
use crate::graph::ShareGroup;
use crate::tape::StageModule;
use crate::{Error, Result};
use candle_dist::ProcessGroup;
use std::collections::BTreeMap;

/// Refuses variables that stages of several ranks ask for and that are no replicated parameter: each rank would have a
/// copy with a part of the gradient. Every rank calls it.
pub(super) fn check(
    group: &ProcessGroup,
    replicated: &[&ShareGroup],
    stages: &BTreeMap<usize, StageModule>,
) -> Result<()> {
    let mut mine: BTreeMap<&str, Option<&str>> = BTreeMap::new();
    for stage in stages.values() {
        let variables = stage.parameters().iter().filter(|(_, tensor)| tensor.is_variable());
        variables.for_each(|(name, _)| _ = mine.entry(name).or_default());
    }
    for share in replicated {
        let copies = stages.values().flat_map(|stage| stage.copy_of(&share.name));
        copies.for_each(|(name, _)| _ = mine.insert(name, Some(&share.name)));
    }
    let unreadable = |error: serde_json::Error| Error::Pipe(format!("the names of parameters: {error}"));
    let texts = group.all_gather_text(&serde_json::to_string(&mine).map_err(unreadable)?)?;
    let mut seen: BTreeMap<String, (usize, Option<String>)> = BTreeMap::new();
    for (rank, text) in texts.iter().enumerate() {
        let names: BTreeMap<String, Option<String>> = serde_json::from_str(text).map_err(unreadable)?;
        for (name, share) in names {
            match seen.get(&name) {
                Some((_, other)) if share.is_some() && *other == share => {}
                Some((other, _)) => {
                    return Err(Error::Pipe(format!(
                        "nodes on ranks {other} and {rank} ask for the parameter {name:?}, and each would have a part of its \
                         gradient; give it to both from PipeBuilder::parameter, with Share::Replicate or Share::Transmit"
                    )));
                }
                None => _ = seen.insert(name, (rank, share)),
            }
        }
    }
    Ok(())
}
