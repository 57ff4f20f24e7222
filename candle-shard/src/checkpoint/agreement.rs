//! What ranks must agree on before they go on.
use super::Named;
use crate::{Error, Result};
use candle_dist::{DeviceMesh, ProcessGroup};
use itertools::{EitherOrBoth, Itertools};

/// This rank's result if all ranks have one; otherwise the first rank's error that has none, on all of them.
pub(super) fn agreed<T>(group: &ProcessGroup, op: &'static str, result: Result<T>) -> Result<T> {
    let text = result.as_ref().err().map(Error::to_string).unwrap_or_default();
    let texts = group.all_gather_text(&text)?;
    match group.ranks().iter().zip(&texts).find(|(_, text)| !text.is_empty()) {
        Some((rank, text)) => Error::op(op, format!("rank {rank}: {text}")),
        None => result,
    }
}

/// Checks that all ranks name the same tensors in the same layouts, which can be saved.
pub(super) fn check_alike(op: &'static str, mesh: &DeviceMesh, tensors: &[Named<'_>]) -> Result<()> {
    let group = mesh.group()?;
    let describe = |(name, spec): &Named<'_>| format!("{name:?} as {spec} on {}", spec.mesh());
    let texts = group.all_gather_text(&tensors.iter().map(describe).join("\n"))?;
    for (rank, text) in group.ranks().iter().zip(&texts) {
        let differs = text.lines().zip_longest(texts[0].lines()).find(|pair| match pair {
            EitherOrBoth::Both(here, there) => here != there,
            _ => true,
        });
        if let Some(pair) = differs {
            let (here, there) = pair.or("nothing more", "nothing more");
            let first = group.ranks()[0];
            return Error::op(op, format!("rank {rank} names {here}, and rank {first} names {there}; name the same"));
        }
    }
    if let Some(name) = tensors.iter().map(|(name, _)| name).duplicates().next() {
        return Error::op(op, format!("{name:?} is named twice; give each tensor a name of its own"));
    }
    for (name, spec) in tensors {
        if *name == "__metadata__" {
            return Error::op(op, format!("{name:?} is no name for a tensor in a safetensors file; choose another"));
        }
        if spec.mesh() != mesh {
            return Error::op(op, format!("{name:?} lies on {}, and {mesh} is saved; save it by itself", spec.mesh()));
        }
        if let Some(p) = spec.placements().iter().find(|p| p.is_partial()) {
            return Error::op(op, format!("{name:?} as {spec} is {p}, not yet a value; redistribute it first"));
        }
    }
    Ok(())
}
